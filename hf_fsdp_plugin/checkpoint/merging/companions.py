"""The files that make weights a model one can load: config, tokenizer, processor, templates, code of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint.formats.stored import refuse
from hf_fsdp_plugin.checkpoint.io import sync
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
    """The folder with the model's config: the one that was named, else the checkpoint, else the run folder above it.

    Raises:
        CheckpointError: the named folder has none.
    """
    if config is not None:
        folder = config.parent if config.name in MODEL_CONFIGS else config
        if not _has_config(folder):
            refuse(config, f"has no {MODEL_CONFIGS[0]}.", "Give the folder that the model was loaded from.")
        return folder
    here = checkpoint.resolve()
    above = (here.parent, here.parent.parent) if here.name.startswith(FSDP_MODEL) else (here.parent,)
    return next((folder for folder in (checkpoint, *above) if _has_config(folder)), None)


def companions(folder: Path) -> list[str]:
    """The files of ``folder`` to take along, relative to it; Python files only where a config names its own code."""
    patterns = [*_PATTERNS, *(["*.py"] if _has_code(folder) else [])]
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in found)


def copy_companions(folder: Path, names: list[str], out: Path, dtype: str | None) -> None:
    """Copy the files; the model's config tells ``dtype`` where that is given."""
    for name in names:
        target = out / name
        target.parent.mkdir(exist_ok=True)
        if name == "config.json" and dtype is not None:
            config = _with_dtype(json.loads((folder / name).read_text(encoding="utf-8")), dtype)
            target.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        else:
            shutil.copyfile(folder / name, target)
        sync(target)


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of the folder, empty where there is none.

    Raises:
        CheckpointError: it is no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        refuse(path, f"cannot be read as JSON: {error}.", "Repair it, or give another folder with --config.")
    if not isinstance(config, dict):
        refuse(path, "is no JSON object.", "Repair it, or give another folder with --config.")
    return config


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config and those nested in it with this dtype, under the key that each has (``torch_dtype`` until 4.56)."""
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
    return any(
        '"auto_map"' in path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("*config.json")
    )
