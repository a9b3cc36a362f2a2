"""Hooks that record the output dtype and the size of the gradients in the first training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    """Facts recorded in the first training step. In later steps, each hook makes at most one comparison.

    Attributes:
        output_dtype: dtype of the first floating-point tensor in the model's output: the loss, if there is one.
        grads_bytes: bytes of the gradients on this rank just before the optimizer step.
    """

    output_dtype: torch.dtype | None = None
    grads_bytes: int | None = None


def record_first_step(model: nn.Module, optimizer: Any = None) -> FirstStep:
    """Record the facts of the next training forward and optimizer step. Call it after the model is sharded."""
    first_step = FirstStep()

    def after_forward(module: nn.Module, args: Any, output: Any) -> None:
        # torch's pytree supports only some of Transformers' output classes. All of them are mappings.
        leaves = tree_leaves(list(output.values()) if isinstance(output, Mapping) else output)
        floats = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        if module.training and floats:
            first_step.output_dtype = floats[0].dtype
            output_handle.remove()

    output_handle = model.register_forward_hook(after_forward)
    inner = unwrapped_optimizer(optimizer)
    if inner is not None:

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            # A hook must not remove itself here: the optimizer iterates over its hooks without a copy.
            if first_step.grads_bytes is None:
                first_step.grads_bytes = gradient_bytes(model, observe_units(model))

        inner.register_step_pre_hook(before_step)
    model.__dict__[_ATTRIBUTE] = first_step
    return first_step


def recorded_first_step(model: nn.Module) -> FirstStep:
    """Return the recorded facts of a model; all are ``None`` if :func:`record_first_step` was not called."""
    return model.__dict__.get(_ATTRIBUTE) or FirstStep()
