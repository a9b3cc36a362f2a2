"""A unit's parameters on their way into a shard: found, given memory, made equal on all ranks, cast."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.precision import cast_to_master
from hf_fsdp_plugin.backends.synchronize import BroadcastRecord, broadcast_parameters, materialize
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.plan.units import UnitPlan


def unit_parameters(unit: UnitPlan, model: nn.Module) -> list[nn.Parameter]:
    """The parameters that the unit owns, each once, in the plan's order (the same on all ranks)."""
    parameters = {id(p): p for p in map(model.get_parameter, unit.parameters)}
    return list(parameters.values())


def prepare_unit(
    plan: FsdpPlan, unit: UnitPlan, model: nn.Module, device: torch.device, record: BroadcastRecord
) -> None:
    """Bring the unit's parameters into the state in which they are cut: present, rank 0's, in the master dtype."""
    if plan.ram_efficient:
        materialize(model, unit.parameters, device, record)
    parameters = unit_parameters(unit, model)
    if plan.ram_efficient or plan.sync_module_states:
        broadcast_parameters(parameters, device, record)
    cast_to_master(plan, parameters)


def ignored_parameters(plan: FsdpPlan, model: nn.Module) -> list[nn.Parameter]:
    """The parameters that stay whole on every rank, each once."""
    return [model.get_parameter(name) for name in plan.ignored_parameters]


def prepare_ignored(
    plan: FsdpPlan, model: nn.Module, device: torch.device, record: BroadcastRecord
) -> list[nn.Parameter]:
    """Ignored parameters are placed by us: FSDP moves only what it manages. Returns them."""
    if plan.ram_efficient:
        materialize(model, plan.ignored_parameters, device, record)
    parameters = ignored_parameters(plan, model)
    if plan.ram_efficient or plan.sync_module_states:
        broadcast_parameters(parameters, device, record)
    for parameter in parameters:
        parameter.data = parameter.data.to(device)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_average_gradient)
    return parameters


def _average_gradient(parameter: torch.Tensor) -> None:
    """Neither FSDP reduces what it ignores: each rank would train its own copy of an ignored parameter on its own
    batches.

    Averaging after every backward is right under gradient accumulation too: what was averaged before is equal on all
    ranks.
    """
    if parameter.grad is not None:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())
