"""Replacements of Accelerate's four functions that read and write FSDP state, for a planned plugin.

Their signatures are those of accelerate 1.15, after the original function as the first parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils.modeling import is_peft_model

from hf_fsdp_plugin.backends.optimizer import owner_of
from hf_fsdp_plugin.checkpoint import load_model, load_optimizer
from hf_fsdp_plugin.integrations.accelerate.plugin import (
    PlannedFsdpPlugin,
    assigned_state_dict_type,
    planned_plugin,
)
from hf_fsdp_plugin.integrations.accelerate.private import prepared_models
from hf_fsdp_plugin.integrations.saving import manager


def _if_planned(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: call ``function(plugin, accelerator, …)`` for an Accelerator with a planned plugin, else the original.

    A script may pass the stock plugin that it made its Accelerator with. A state dict type that it assigned is used.
    """

    @functools.wraps(function)
    def replacement(original: Callable[..., Any], fsdp_plugin: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(fsdp_plugin, PlannedFsdpPlugin):
            return function(fsdp_plugin, accelerator, *args, **kwargs)
        planned = planned_plugin(accelerator)
        if planned is None:
            return original(fsdp_plugin, accelerator, *args, **kwargs)
        kind = planned.state_dict_kind
        planned.set_state_dict_type(assigned_state_dict_type(fsdp_plugin))
        try:
            return function(planned, accelerator, *args, **kwargs)
        finally:
            planned.set_state_dict_type(kind)

    return replacement


@_if_planned
def save_fsdp_model(
    plugin: PlannedFsdpPlugin,
    accelerator: Any,
    model: Any,
    output_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    **_: Any,
) -> None:
    folder = Path(output_dir)
    save = manager.open_save(folder)
    if save is None or model_index not in save.models:  # the replacement of Trainer.save_model has already written it
        adapters = _only_adapters(adapter_only, model)
        manager.save_model(model, folder, plugin.state_dict_kind, model_index, adapter_only=adapters)


@_if_planned
def load_fsdp_model(
    plugin: PlannedFsdpPlugin,
    accelerator: Any,
    model: Any,
    input_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    **_: Any,
) -> Any:
    adapters, verify = _only_adapters(adapter_only, model), plugin.spec.checkpoint.verify
    return load_model(model, Path(input_dir), model_index, adapter_only=adapters, verify=verify)


@_if_planned
def save_fsdp_optimizer(
    plugin: PlannedFsdpPlugin,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    output_dir: Any,
    optimizer_index: int = 0,
    **_: Any,
) -> None:
    optimizer, owner = _with_owner(accelerator, optimizer, model)
    manager.save_optimizer(owner, optimizer, Path(output_dir), plugin.state_dict_kind, optimizer_index)


@_if_planned
def load_fsdp_optimizer(
    plugin: PlannedFsdpPlugin,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    input_dir: Any,
    optimizer_index: int = 0,
    **_: Any,
) -> Any:
    optimizer, owner = _with_owner(accelerator, optimizer, model)
    return load_optimizer(owner, optimizer, Path(input_dir), optimizer_index, verify=plugin.spec.checkpoint.verify)


def _with_owner(accelerator: Any, optimizer: Any, model: Any) -> tuple[Any, Any]:
    """Return the torch optimizer inside an ``AcceleratedOptimizer``, and the models whose parameters it has.

    Accelerate pairs models and optimizers by their positions, which is wrong for an optimizer of several models.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    return optimizer, owner_of(optimizer, prepared_models(accelerator)) or model


def _only_adapters(adapter_only: bool, model: Any) -> bool:
    """Return whether to save or load only adapters. The Trainer sets ``adapter_only`` for models without PEFT too."""
    return adapter_only and is_peft_model(model)
