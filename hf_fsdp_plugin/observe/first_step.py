"""Hooks that record the output dtype, and the size of the gradients before they are cleared, in the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.observe.memory import gradient_bytes
from hf_fsdp_plugin.observe.optimizer import unwrapped_optimizer
from hf_fsdp_plugin.observe.units import observe_units
from hf_fsdp_plugin.torch_private.functions import tree_leaves

_ATTRIBUTE = "_hf_fsdp_first_step"


@dataclass(kw_only=True)
class FirstStep:
    """Facts recorded during the first training step; later steps cost one comparison at most.

    Attributes:
        output_dtype: of the first floating-point tensor that the model returned (the loss, if there is one).
        grads_bytes: bytes of the gradients on this rank when the optimizer stepped.
    """

    output_dtype: torch.dtype | None = None
    grads_bytes: int | None = None
    handles: list[Any] = field(default_factory=list, repr=False)


def record_first_step(model: nn.Module, optimizer: Any = None) -> FirstStep:
    """Record facts of the next training forward and the next optimizer step. Call it after the model is sharded."""
    first_step = FirstStep()

    def after_forward(module: nn.Module, args: Any, output: Any) -> None:
        floats = [t for t in tree_leaves(_fields(output)) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        if module.training and floats:
            first_step.output_dtype = floats[0].dtype
            output_handle.remove()

    output_handle = model.register_forward_hook(after_forward)
    first_step.handles.append(output_handle)
    inner = unwrapped_optimizer(optimizer)
    if inner is not None:

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            # A hook must not remove itself here: the optimizer iterates over its hooks without a copy.
            if first_step.grads_bytes is None:
                first_step.grads_bytes = gradient_bytes(model, observe_units(model))

        first_step.handles.append(inner.register_step_pre_hook(before_step))
    model.__dict__[_ATTRIBUTE] = first_step
    return first_step


def recorded_first_step(model: nn.Module) -> FirstStep:
    """Return what was recorded on a model; empty if :func:`record_first_step` was not called."""
    return model.__dict__.get(_ATTRIBUTE) or FirstStep()


def _fields(output: Any) -> Any:
    """Return the entries of a Transformers output, whose first one is the loss; pytree knows only some classes."""
    return list(output.values()) if isinstance(output, Mapping) else output
