"""Norms and clipping of sharded gradients by torch's own functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_fsdp_plugin.backends.clipping import check_whole_gradients, clip_grad_norm
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


def get_total_norm(original: Callable[..., torch.Tensor], tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Refuse gradients of FSDP1's shards. An empty list on this rank may be a list of gradients on another one.

    Raises:
        SpecError: the result would be the norm of one rank's shards.
    """
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    check_whole_gradients(sharded_models(), tensors)
    return original(tensors, *args, **kwargs)
