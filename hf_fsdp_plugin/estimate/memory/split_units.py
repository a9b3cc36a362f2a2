"""Units that FSDP1 splits off because of their dtype: code around them sees their shards, and casts their inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.backends.load import master_dtype
from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.torch_private.modules import parameters as own_parameters

Slot = tuple[dict[str, nn.Parameter | None], str, nn.Parameter]
"""Where a parameter is registered, and the one that the forward of its unit uses."""


@contextmanager
def stored_dtypes_outside(plan: FsdpPlan, model: nn.Module) -> Iterator[None]:
    """Let split-off units have the dtype of the computation inside their forward only, as FSDP1's units have.

    PEFT casts the input of each adapter to the dtype of its weight, which is that of the shards; FSDP1 casts it back.
    So every adapter saves a copy of its input for the backward, also if adapters have the same input.

    Args:
        model: with parameters in the dtype of the computation.
    """
    dtype = torch_dtype(plan.precision.param)
    split = [unit for unit in plan.units if unit.is_split_off and plan.backend == "fsdp1" and dtype is not None]
    with ExitStack() as stack:
        for unit in split:
            own = {id(model.get_parameter(name)) for name in unit.parameters}
            for name in unit.modules:
                stack.enter_context(_stored_outside(plan, model.get_submodule(name), own, dtype))
        yield


@contextmanager
def _stored_outside(plan: FsdpPlan, unit: nn.Module, own: set[int], dtype: torch.dtype | None) -> Iterator[None]:
    slots: list[Slot] = [
        (registered, key, parameter)
        for module in unit.modules()
        for registered in [own_parameters(module)]
        for key, parameter in registered.items()
        if parameter is not None and id(parameter) in own
    ]
    stored = [nn.Parameter(p.detach().to(master_dtype(plan, p)), requires_grad=p.requires_grad) for _, _, p in slots]

    def register(*, inside: bool) -> None:
        for (registered, key, parameter), shard in zip(slots, stored, strict=True):
            registered[key] = parameter if inside else shard

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        register(inside=True)
        return tuple(x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        register(inside=False)

    handles = [unit.register_forward_pre_hook(before), unit.register_forward_hook(after)]
    register(inside=False)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        register(inside=True)
