"""Replacements of PEFT's methods that merge adapters into the base model, or remove them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.torch_private.modules import is_fsdp_managed


def refuse_if_sharded(original: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise ``SpecError`` for a sharded model: PEFT would multiply shards, and replace modules that FSDP manages."""
    if not any(is_fsdp_managed(module) for module in tuner.modules()):
        return original(*args, **kwargs)
    message = "each rank has only parts of the weights, so adapters cannot be merged or removed in a sharded model."
    fix = (
        "Save the adapters (trainer.save_model, or save_pretrained on all ranks), and merge them in one process: "
        "PeftModel.from_pretrained(base_model, folder).merge_and_unload()."
    )
    raise SpecError([Problem(code="FSDP-E631", message=message, fix=fix)])
