"""Makes small models and a dataset in the layouts of the caches, under the names that suites download from the hub."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REVISION = "0" * 40
_SMALL: dict[str, Any] = {
    **{"hidden_size": 32, "d_model": 32, "n_embd": 32, "word_embed_proj_dim": 32, "embed_dim": 32},
    **{"intermediate_size": 64, "ffn_dim": 64, "d_ff": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "n_inner": 64},
    **{"num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "encoder_layers": 2, "decoder_layers": 2},
    **{
        "num_attention_heads": 4,
        "n_head": 4,
        "num_heads": 4,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    },
    **{"num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "max_position_embeddings": 512, "n_positions": 512},
    **{"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
    **{"layer_types": None, "pad_token_id": None},
}
"""Sizes of the attributes that a config has."""


def make_hub(folder: Path, models: Mapping[str, str]) -> None:
    """Make the models that `folder` does not have.

    Args:
        folder: what ``HF_HOME`` will be.
        models: hub name -> class of Transformers. BERT's have the tokenizer of MiniLM, all others that of SmolLM2.
    """
    _make_zen(folder / "datasets")
    for name, class_name in models.items():
        root = folder / "hub" / f"models--{name.replace('/', '--')}"
        made_as = root / "class"
        if made_as.exists() and made_as.read_text() == class_name:
            continue
        shutil.rmtree(root, ignore_errors=True)
        snapshot = root / "snapshots" / REVISION
        _make_model(class_name, snapshot)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(REVISION)
        made_as.write_text(class_name)


def _make_model(class_name: str, folder: Path) -> None:
    import torch
    import transformers

    from scripts.data import MINILM, SMOLLM2, load_tokenizer

    model_class = getattr(transformers, class_name)
    tokenizer = load_tokenizer(MINILM if class_name.startswith(("Bert", "Roberta")) else SMOLLM2)
    default = model_class.config_class()
    sizes = {key: value for key, value in _SMALL.items() if hasattr(default, key)}
    ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(0)
    config = model_class.config_class(**{**sizes, **ids, "vocab_size": len(tokenizer)})
    if hasattr(config, "decoder_start_token_id"):
        config.decoder_start_token_id = tokenizer.pad_token_id
    model_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_zen(folder: Path) -> None:
    """Make the dataset ``trl-internal-testing/zen``: one configuration for each form of TRL's datasets."""
    import datasets
    from datasets.arrow_writer import ArrowWriter

    for name, columns in _zen_columns().items():
        target = folder / "trl-internal-testing___zen" / name / "0.0.0" / REVISION
        if target.exists():
            continue
        whole = datasets.Dataset.from_dict(columns).train_test_split(test_size=0.1, shuffle=False)
        partial = target.with_name("partial")
        partial.mkdir(parents=True)
        splits = datasets.SplitDict(dataset_name="zen")
        for split, rows in whole.items():
            with ArrowWriter(path=str(partial / f"zen-{split}.arrow"), features=rows.features) as writer:
                for row in rows:
                    writer.write(row)
                writer.finalize()
            splits.add(datasets.SplitInfo(name=split, num_bytes=1, num_examples=len(rows), dataset_name="zen"))
        datasets.DatasetInfo(
            features=whole["train"].features, config_name=name, dataset_name="zen", splits=splits, builder_name="cache"
        ).write_to_directory(str(partial))
        partial.rename(target)


def _zen_columns() -> dict[str, dict[str, Any]]:
    """Return configuration -> column -> values. The conversational forms have the same texts."""
    halves = [(f"Number {number} is", f" one less than {number + 1}.") for number in range(20)]
    prompts, answers = map(list, zip(*halves, strict=True))
    wrong = [f" the same as {number + 2}." for number in range(20)]
    texts = [prompt + answer for prompt, answer in halves]
    standard: dict[str, dict[str, Any]] = {
        "language_modeling": {"text": texts},
        "prompt_only": {"prompt": prompts},
        "prompt_completion": {"prompt": prompts, "completion": answers},
        "preference": {"prompt": prompts, "chosen": answers, "rejected": wrong},
        "implicit_prompt_preference": {
            "chosen": texts,
            "rejected": [a + b for a, b in zip(prompts, wrong, strict=True)],
        },
        "unpaired_preference": {"prompt": prompts, "completion": answers, "label": [n % 2 == 0 for n in range(20)]},
    }
    forms = {f"standard_{name}": columns for name, columns in standard.items()}
    for name, columns in standard.items():
        chats = {
            {"text": "messages"}.get(key, key): values if key == "label" else _chats(values, key, "prompt" in columns)
            for key, values in columns.items()
        }
        forms[f"conversational_{name}"] = chats
    return forms


def _chats(texts: list[str], column: str, has_prompt: bool) -> list[list[dict[str, str]]]:
    """Return a conversation for each text: a question, an answer, or both if the column is a whole conversation."""
    question, answer = ({"role": role} for role in ("user", "assistant"))
    if column == "prompt":
        return [[question | {"content": text}] for text in texts]
    if has_prompt:
        return [[answer | {"content": text}] for text in texts]
    return [[question | {"content": "Continue."}, answer | {"content": text}] for text in texts]
