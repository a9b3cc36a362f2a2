"""The files that are copied beside merged weights: configs, tokenizer, processor, chat templates, code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.errors import file_problems_inside, raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.file_io import read_file, sync, write_atomically

MODEL_CONFIGS = ("config.json", file_names.ADAPTER_CONFIG)
_PATTERNS = (
    *MODEL_CONFIGS, "generation_config.json", "*tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "*.model", "*processor_config.json", "feature_extractor_config.json", "chat_template*",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
"""Files that are copied. Those of sentencepiece are ``*.model``."""


def find_config_folder(checkpoint: Path, config: Path | None, names: Sequence[str] = MODEL_CONFIGS) -> Path | None:
    """Return the first folder with a model config: ``config`` if given, else the checkpoint or the run folder above it.

    Args:
        names: the file names of configs.

    Raises:
        CheckpointError: the given folder has no config.
    """
    if config is not None:
        folder = config.parent if config.name in names else config
        if not _has_config(folder, names):
            fix = "Give the folder from which the model was loaded."
            refuse("FSDP-E489", config, f"has no {names[0]}.", fix)
        return folder
    here = checkpoint.resolve()
    above = (here.parent, here.parent.parent) if here.name.startswith(file_names.FSDP_MODEL) else (here.parent,)
    return next((folder for folder in (checkpoint, *above) if _has_config(folder, names)), None)


def companion_files(folder: Path) -> list[str]:
    """Return the paths of the files to copy, relative to ``folder``; Python files only if a config refers to them.

    Raises:
        CheckpointError: a file is a link out of the folder, to a file that the checkpoint must not publish.
    """
    has_code = any(b'"auto_map"' in read_file(path) for path in folder.glob("*config.json") if path.is_file())
    patterns = [*_PATTERNS, *(["*.py"] if has_code else [])]
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    names = sorted(path.relative_to(folder).as_posix() for path in found)
    raise_if_any(file_problems_inside(folder, names, folder))
    return names


def copy_companions(folder: Path, names: list[str], out: Path, dtype: str | None, *, untie: bool = False) -> None:
    """Copy the files. If ``dtype`` is given, it replaces the dtype in the model's config.

    Args:
        untie: the config says that embeddings are not tied.
    """
    for name in names:
        target = out / name
        target.parent.mkdir(exist_ok=True)
        if name == "config.json" and (dtype is not None or untie):
            config = json.loads((folder / name).read_text(encoding="utf-8"))
            config = config if dtype is None else _with_dtype(config, dtype)
            config |= {"tie_word_embeddings": False} if untie else {}
            write_atomically(target, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        else:
            shutil.copyfile(folder / name, target)
            sync(target)


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the config and its nested configs with this dtype, under the existing key (``torch_dtype`` until 4.56)."""
    changed = {
        key: _with_dtype(value, dtype) if isinstance(value, dict) and key.endswith("_config") else value
        for key, value in config.items()
        if key != "quantization_config"
    }
    keys = [key for key in ("dtype", "torch_dtype") if key in config]
    return {**config, **changed, **dict.fromkeys(keys, dtype)}


def _has_config(folder: Path, names: Sequence[str]) -> bool:
    return any((folder / name).is_file() for name in names)
