"""Ignored modules in mixed precision: they compute in the planned dtype, although FSDP does not cast their parameters.

Otherwise activations in the compute dtype would meet parameters in fp32, and torch raises for a matrix product of
different dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.torch_private.functions import tree_map_only


def apply_autocast(plan: FsdpPlan, model: nn.Module) -> None:
    """Run the forward of each ignored module under autocast, and cast its output to the compute dtype.

    This includes modules with a weight that is tied to an ignored one. Autocast alone returns fp32 from operations that
    it does not cast, such as norms. The next module, whose weights FSDP casts, could not compute with it. Stock
    Accelerate runs the whole model under autocast.
    """
    dtype = torch_dtype(plan.precision.param)
    if dtype not in (torch.bfloat16, torch.float16):
        return
    for module in _outermost(plan, model):
        module.forward = _in_dtype(module.forward, plan.device_type, dtype)


def _outermost(plan: FsdpPlan, model: nn.Module) -> list[nn.Module]:
    """Return the ignored modules that are not in another one, and other modules that have a parameter of them."""
    ignored = [model.get_submodule(name) for name in plan.ignored_modules]
    inner = {id(module) for outer in ignored for module in outer.modules() if module is not outer}
    all_inside = {id(module) for outer in ignored for module in outer.modules()}
    parameters = {id(parameter) for outer in ignored for parameter in outer.parameters()}
    tied = [
        module
        for module in model.modules()
        if id(module) not in all_inside and any(id(p) in parameters for p in module.parameters(recurse=False))
    ]
    return [module for module in ignored if id(module) not in inner] + tied


def _in_dtype(forward: Callable[..., Any], device_type: str, dtype: torch.dtype) -> Callable[..., Any]:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    @functools.wraps(forward)
    def in_dtype(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype):
            output = forward(*args, **kwargs)
        return tree_map_only(torch.Tensor, cast, output)

    return in_dtype
