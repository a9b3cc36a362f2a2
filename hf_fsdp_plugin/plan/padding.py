"""Padding of parameters under FSDP2, which splits each one on its first dimension: how much, and a warning of much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Final

from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.text import plural

SIGNIFICANT: Final = 0.1
"""Share of padding from which FSDP-W837 is reported: in all units together, or in the largest one."""
_LEAST_ELEMENTS: Final = 1 << 12
"""Elements of padding from which it is reported: in models that are smaller, it does not matter."""

Shapes = Sequence[Mapping[str, Sequence[int]]]
"""Name -> shape of the parameters of each unit."""


def padded_shape(shape: Sequence[int], shards: int) -> tuple[int, ...]:
    """Return the shape of a parameter that FSDP2 pads to equal shards of its first dimension.

    See ``FSDPParam._init_sharded_param`` of torch 2.13.
    """
    return (ceil(shape[0] / shards) * shards, *shape[1:])


def unit_shapes(plan: FsdpPlan, model: nn.Module) -> Shapes:
    """Return the shapes of the parameters of each unit of a plan."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    return [{name: shapes[name] for name in unit.parameters} for unit in plan.units]


def padding_of(units: Shapes, shards: int) -> tuple[float, dict[str, int]]:
    """Return the padding of units under FSDP2 over a number of shards: its part, and elements of each parameter.

    FSDP2 splits each parameter on its first dimension, and pads the parts to the size of the first one
    (``FSDPParam._init_sharded_param`` of torch 2.13): a parameter of 8 rows over 64 ranks becomes one of 64 rows. Each
    rank stores its padded part, the buffers of all-gathers and reduce-scatters have the padded size, and only ranks
    with rows have optimizer state. The part is that of all units together, or of the largest one if it is more there:
    the memory for gathered units depends on it.
    """
    real = [sum(map(prod, unit.values())) for unit in units]
    padded = [sum(prod(padded_shape(shape, shards)) for shape in unit.values()) for unit in units]
    share = max(1 - sum(real) / max(1, sum(padded)), 1 - max(real) / max(1, max(padded)))
    lost = {name: prod(padded_shape(s, shards)) - prod(s) for unit in units for name, s in unit.items()}
    return share, lost


def with_padding_warning(plan: FsdpPlan, model: nn.Module) -> FsdpPlan:
    """Return the plan with a warning if much of what FSDP2 stores and communicates is padding.

    Args:
        model: the model that was planned, not sharded. Models that were sharded before ``prepare`` keep their shards.
    """
    shards = plan.mesh.num_shards
    if plan.backend != "fsdp2" or plan.pre_sharded or plan.mesh.has_divided_layers or shards == 1 or not plan.units:
        return plan
    units = unit_shapes(plan, model)
    share, lost = padding_of(units, shards)
    if share < SIGNIFICANT or sum(lost.values()) < _LEAST_ELEMENTS:
        return plan
    first = max(lost, key=lambda name: lost[name])
    rows = next(unit[first][0] for unit in units if first in unit)
    message = f"{share:.0%} of what FSDP2 stores and communicates is padding: it splits each parameter on its first "
    message += f"dimension into {shards:,} parts of equal size. For example, {first} has {plural(rows, 'row')} and is "
    message += f"padded to {ceil(rows / shards) * shards:,}."
    problem = plan.spec.problem("FSDP-W837", "mesh.shard", message, _padding_remedy(plan, units))
    return replace(plan, problems=(*plan.problems, problem))


def _padding_remedy(plan: FsdpPlan, units: Shapes) -> str:
    """Return the remedy: to set the largest shard group without much padding, or FSDP1, which pads whole units only."""
    flat = "set fsdp_version: 1, which shards all parameters of a unit as one flat tensor."
    for size in range(plan.mesh.num_shards - 1, 1, -1):
        if plan.world_size % size == 0 and (left := padding_of(units, size)[0]) < SIGNIFICANT:
            return (
                f"Set mesh.shard (parallelism_config_dp_shard_size) to {size}: with {plan.world_size // size} replicas "
                f"of {size} shards, {left:.0%} is padding, and each rank stores 1/{size} of the model. Or {flat}"
            )
    return flat[0].upper() + flat[1:]
