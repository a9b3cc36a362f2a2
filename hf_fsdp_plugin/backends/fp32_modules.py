"""Modules that compute in fp32 in mixed precision.

FSDP2 gathers their parameters in fp32, but casts the inputs of units to the compute dtype. torch raises for a matrix
product of different dtypes, and a norm with an fp32 weight returns fp32, with which the next module could not compute.
FSDP1 casts inputs and outputs of the module classes that it excludes from mixed precision in the same way
(``_override_module_mixed_precision`` in ``torch/distributed/fsdp/_wrap_utils.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.torch_private.functions import tree_map_only

Forward = Callable[..., Any]


def compute_in_fp32(plan: FsdpPlan, model: nn.Module) -> None:
    """Make the forwards of the plan's fp32 modules compute in fp32."""
    for module, forward in fp32_forwards(plan, model):
        module.forward = forward


def fp32_forwards(plan: FsdpPlan, model: nn.Module) -> Iterator[tuple[nn.Module, Forward]]:
    """Yield each fp32 module of a plan with a forward that casts floating-point inputs to fp32, without autocast.

    Outputs are cast back to the compute dtype, except those of the model's head: the loss is computed in fp32.
    """
    compute = torch_dtype(plan.precision.param)
    head = _head(model)
    for name in plan.fp32_modules:
        module = model.get_submodule(name)
        yield module, _in_fp32(module.forward, plan.device_type, None if module is head else compute)


def fp32_ids(plan: FsdpPlan, model: nn.Module, names: Iterable[str] | None = None) -> frozenset[int]:
    """Return the ids of the parameters that are gathered in fp32, while the model contains these objects.

    Args:
        names: only these parameters. Default: all.
    """
    selected = plan.fp32_parameters if names is None else set(names).intersection(plan.fp32_parameters)
    return frozenset(id(model.get_parameter(name)) for name in selected)


def _head(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    try:
        found = getter() if getter is not None else None
    except NotImplementedError:
        return None
    return found if isinstance(found, nn.Module) else None


def _in_fp32(forward: Forward, device_type: str, output_dtype: torch.dtype | None) -> Forward:
    def cast(dtype: torch.dtype | None) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda tensor: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    @functools.wraps(forward)
    def in_fp32(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, cast(torch.float32), (args, kwargs))
        with torch.autocast(device_type, enabled=False):
            output = forward(*args, **kwargs)
        return tree_map_only(torch.Tensor, cast(output_dtype), output)

    return in_fp32
