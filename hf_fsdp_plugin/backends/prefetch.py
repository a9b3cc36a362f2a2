"""FSDP2's all-gathers moved earlier or later: explicit prefetch lists for what FSDP1 has as constructor arguments."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.torch_private.fsdp2 import mark_backward_prefetch


def set_forward_prefetch(plan: FsdpPlan, model: nn.Module) -> None:
    """Each unit starts its successor's all-gather before its own forward.

    The successor is the next in the order of the module tree, which is the order of execution for all but exotic
    models; elsewhere a wrong guess costs memory, never a wrong result.
    """
    if not plan.prefetch.forward:
        return
    units = _units_in_order(plan, model)
    for unit, successor in pairwise(units):
        unit.set_modules_to_forward_prefetch([successor])


def set_backward_prefetch(plan: FsdpPlan, model: nn.Module) -> None:
    """``pre`` is FSDP2's own behaviour: the next all-gather runs beside this unit's backward.

    ``none``: a list that names only the unit itself, which is there already, so that nothing is fetched ahead.
    ``post``: as ``none``, and the next all-gather starts once this unit's gradients are computed, before their
    reduce-scatter: at most one unit is gathered at a time.
    """
    if plan.prefetch.backward == "pre":
        return
    units = _units_in_order(plan, model)
    for unit in units:
        unit.set_modules_to_backward_prefetch([unit])
        mark_backward_prefetch(unit, plan.prefetch.backward)
    if plan.prefetch.backward == "post":
        for unit, predecessor in zip(units[1:], units, strict=False):
            _unshard_after_backward(unit, predecessor)


def _unshard_after_backward(unit: Any, predecessor: FSDPModule) -> None:
    """Gather ``predecessor`` when the gradients of ``unit``'s inputs are there: the end of its backward."""

    def on_input_gradient(gradient: torch.Tensor) -> None:
        predecessor.unshard(async_op=True)

    def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            inputs = [*args, *kwargs.values()]
            needs_gradient = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
            if needs_gradient:
                needs_gradient[0].register_hook(on_input_gradient)

    # Registered after fully_shard's own hook, so the tensor it sees is the one FSDP2 passes on.
    unit.register_forward_pre_hook(before_forward, with_kwargs=True)


def _units_in_order(plan: FsdpPlan, model: nn.Module) -> list[Any]:
    """The FSDP modules below the root, in the order of the module tree; of a group of modules, the first."""
    position = {id(module): index for index, module in enumerate(model.modules())}
    firsts = [model.get_submodule(unit.modules[0]) for unit in plan.units if unit.modules != ("",)]
    return sorted((m for m in firsts if isinstance(m, FSDPModule)), key=lambda m: position[id(m)])
