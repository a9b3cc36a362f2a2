"""Clipping of sharded gradients by torch's own function and by value."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad_value_

from hf_fsdp_plugin.backends.clipping import clip_grad_norm
from hf_fsdp_plugin.backends.shard import sharded_models
from hf_fsdp_plugin.torch_private import fsdp1


def clip_grad_norm_(
    original: Callable[..., torch.Tensor],
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip by the norm of all shards if FSDP1 has sharded a parameter. Collective in this case.

    Raises:
        SpecError: FSDP1 has sharded a parameter of a model that is not prepared.
        RuntimeError: the norm is not finite, if ``error_if_nonfinite``.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not any(fsdp1.is_flattened(parameter) for parameter in parameters):
        return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    limit = float("inf") if error_if_nonfinite else max_norm
    total = clip_grad_norm(sharded_models(), parameters, float(limit), float(norm_type))
    if not error_if_nonfinite:
        return total
    if not torch.isfinite(total):
        raise RuntimeError(f"the norm of the gradients is {total.item()}, and error_if_nonfinite=True.")
    return clip_grad_norm(sharded_models(), parameters, float(max_norm), float(norm_type))


def allow_clipping_by_value(accelerator: Any) -> None:
    """Let ``accelerator.clip_grad_value_`` clip shards: Accelerate refuses it under FSDP, but it is elementwise."""
    reference = weakref.ref(accelerator)

    def clip_shards_by_value(parameters: Any, clip_value: float) -> None:
        if (owner := reference()) is not None:
            owner.unscale_gradients()
        clip_grad_value_(parameters, clip_value)

    accelerator.clip_grad_value_ = clip_shards_by_value
