"""The dtype of what a unit receives in mixed precision.

FSDP casts every floating-point tensor that its root receives to the compute dtype, and FSDP2 also those of every other
unit. This changes numbers that are not activations: bf16 has 8 significant bits, so a loss is divided by 260 instead of
261 labels, and fp16 ends at 65,504. Here only activations are cast, which have a batch and at least one other
dimension. Tensors with fewer dimensions keep their dtype: counts, weights of samples, time steps.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from hf_fsdp_plugin.torch_private import fsdp1
from hf_fsdp_plugin.torch_private.functions import tree_map

_DTYPE: Final = "_hf_fsdp_input_dtype"
_ACTIVATION_DIMS: Final = 2


def cast_inputs_of(unit: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast the activations that a unit receives. FSDP itself must not cast its inputs.

    Args:
        dtype: ``None`` if the unit computes in the dtype of its shards.
    """
    if dtype is not None:
        is_new = _DTYPE not in vars(unit)
        setattr(unit, _DTYPE, dtype)
        if is_new:
            # Before FSDP2's own hook, which looks for tensors that require gradients.
            unit.register_forward_pre_hook(_before_forward, prepend=True, with_kwargs=True)


def cast_inputs(
    unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a unit, with its activations in the compute dtype."""
    inputs: tuple[tuple[Any, ...], dict[str, Any]] = cast_activations((args, kwargs), vars(unit).get(_DTYPE))
    return inputs


def cast_activations(inputs: Any, dtype: torch.dtype | None) -> Any:
    """Return a tree of inputs with its activations in ``dtype``; unchanged for ``None``."""
    if dtype is None:
        return inputs

    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(dtype) if is_activation(value) else value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
            return dataclasses.replace(value, **cast_activations(fields, dtype))
        return value

    return tree_map(cast, inputs)


def is_activation(tensor: torch.Tensor) -> bool:
    """Whether a tensor that a unit receives is cast to the compute dtype."""
    return tensor.is_floating_point() and tensor.dim() >= _ACTIVATION_DIMS


def _before_forward(unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if isinstance(unit, FullyShardedDataParallel) and fsdp1.is_summoned(unit):
        return None  # it computes with the summoned parameters, which have the dtype of the shards
    return cast_inputs(unit, args, kwargs)
