"""Copies the files that ``from_pretrained`` needs besides weights: config, tokenizer, processor, templates, code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint.formats.errors import raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.formats.stored import file_problems_inside
from hf_fsdp_plugin.checkpoint.io import read_file, sync
from hf_fsdp_plugin.checkpoint.names import FSDP_MODEL

MODEL_CONFIGS = ("config.json", "adapter_config.json")
_PATTERNS = (
    *MODEL_CONFIGS,
    "generation_config.json",
    "*tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",  # sentencepiece
    "*processor_config.json",
    "feature_extractor_config.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)


def find_config_folder(checkpoint: Path, config: Path | None) -> Path | None:
    """Return the first folder with a model config: ``config`` if given, else the checkpoint or the run folder above it.

    Raises:
        CheckpointError: the given folder has no config.
    """
    if config is not None:
        folder = config.parent if config.name in MODEL_CONFIGS else config
        if not _has_config(folder):
            refuse(
                "FSDP-E489", config, f"has no {MODEL_CONFIGS[0]}.", "Give the folder from which the model was loaded."
            )
        return folder
    here = checkpoint.resolve()
    above = (here.parent, here.parent.parent) if here.name.startswith(FSDP_MODEL) else (here.parent,)
    return next((folder for folder in (checkpoint, *above) if _has_config(folder)), None)


def companions(folder: Path) -> list[str]:
    """Return the paths of the files to copy, relative to ``folder``; Python files only if a config refers to them.

    Raises:
        CheckpointError: a file is a link out of the folder, to a file that the checkpoint must not publish.
    """
    patterns = [*_PATTERNS, *(["*.py"] if _has_code(folder) else [])]
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    names = sorted(path.relative_to(folder).as_posix() for path in found)
    raise_if_any(file_problems_inside(folder, names, folder))
    return names


def copy_companions(folder: Path, names: list[str], out: Path, dtype: str | None) -> None:
    """Copy the files. If ``dtype`` is given, it replaces the dtype in the model's config."""
    for name in names:
        target = out / name
        target.parent.mkdir(exist_ok=True)
        if name == "config.json" and dtype is not None:
            config = _with_dtype(json.loads((folder / name).read_text(encoding="utf-8")), dtype)
            target.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
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


def _has_config(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MODEL_CONFIGS)


def _has_code(folder: Path) -> bool:
    return any(b'"auto_map"' in read_file(path) for path in folder.glob("*config.json") if path.is_file())
