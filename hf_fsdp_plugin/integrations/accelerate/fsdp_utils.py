"""Accelerate's four functions that read and write FSDP state, for our plugin by our own path.

Accelerate and the Trainer import them by name, so they are replaced in each namespace; read against accelerate 1.15.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

# Where the replacement of a host's function or method keeps the original.
PATCHED = "_hf_fsdp_original"


def replace_checkpoint_functions(module: ModuleType) -> None:
    """In ``module``'s namespace, where Accelerate's functions were imported to by name."""
    from accelerate.utils import fsdp_utils

    for name in ("save_fsdp_model", "load_fsdp_model", "save_fsdp_optimizer", "load_fsdp_optimizer"):
        if hasattr(module, name):
            original = getattr(fsdp_utils, name)
            setattr(module, name, _checkpoint_function(name, getattr(original, PATCHED, original)))


def _checkpoint_function(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """``name`` with the host's signature (which Transformers inspects), for our plugin by our own path."""
    of_optimizer = name.endswith("optimizer")

    @functools.wraps(original)
    def function(fsdp_plugin: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        from hf_fsdp_plugin.checkpoint.reading.model import load_model
        from hf_fsdp_plugin.checkpoint.reading.optimizer import load_optimizer
        from hf_fsdp_plugin.checkpoint.writing import state_files
        from hf_fsdp_plugin.checkpoint.writing.save import open_save
        from hf_fsdp_plugin.integrations.accelerate.plugin import PlannedFsdpPlugin

        if not isinstance(fsdp_plugin, PlannedFsdpPlugin):
            return original(fsdp_plugin, accelerator, *args, **kwargs)
        bound = inspect.signature(original).bind(fsdp_plugin, accelerator, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        folder = Path(given.get("output_dir") or given["input_dir"])
        kind = fsdp_plugin.state_dict_kind
        if of_optimizer:
            optimizer = getattr(given["optimizer"], "optimizer", given["optimizer"])
            number = given["optimizer_index"]
            if name.startswith("save"):
                return state_files.save_optimizer(given["model"], optimizer, folder, kind, number)
            return load_optimizer(given["model"], optimizer, folder, number)
        number, adapters = given["model_index"], _adapter_only(given)
        if name.startswith("load"):
            return load_model(given["model"], folder, number, adapter_only=adapters)
        save = open_save(folder)
        if save is None or number not in save.models:  # the Trainer's model is saved with its config
            state_files.save_model(given["model"], folder, kind, number, adapter_only=adapters)
        return None

    setattr(function, PATCHED, original)
    return function


def _adapter_only(given: Any) -> bool:
    """The Trainer always asks for adapters only; it means it for PEFT models alone."""
    from accelerate.utils.modeling import is_peft_model

    with suppress(AttributeError):
        return bool(given["adapter_only"]) and is_peft_model(given["model"])
    return False
