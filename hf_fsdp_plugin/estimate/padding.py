"""How much of what FSDP2 stores and communicates is padding, and a warning if it is much."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from torch import nn

from hf_fsdp_plugin.estimate.unit_sizes import padded_shape
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_count, format_names, plural

SIGNIFICANT: Final = 0.1
"""Part of padding, in all units together or in the largest unit, from which it is reported."""
_LEAST_ELEMENTS: Final = 1 << 12
"""Elements of padding from which it is reported: in models that are smaller, it does not matter."""
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """Elements of a model's parameters without and with padding, for one number of shards.

    Attributes:
        real, padded: of all units. Stored shards, gathered parameters and reduced gradients grow in this ratio.
        largest, largest_padded: of the largest unit, which the memory for gathered units depends on.
        names: parameters of which at least the part `SIGNIFICANT` is padding, the most padding first.
    """

    real: int
    padded: int
    largest: int
    largest_padded: int
    names: tuple[str, ...]

    @property
    def share(self) -> float:
        """Part of padding in all units together, or in the largest one if it is more there."""
        units = (self.real, self.padded), (self.largest, self.largest_padded)
        return max(1 - real / max(padded, 1) for real, padded in units)


Shapes = Sequence[Mapping[str, Sequence[int]]]
"""Name -> shape of the parameters of each unit."""


def unit_shapes(plan: FsdpPlan, model: nn.Module) -> Shapes:
    """Return the shapes of the parameters of each unit of a plan."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    return [{name: shapes[name] for name in unit.parameters} for unit in plan.units]


def padding_of(units: Shapes, shards: int) -> Padding:
    """Return the padding of units under FSDP2 over a number of shards.

    FSDP2 splits each parameter on its first dimension, and pads the parts to the size of the first one
    (``FSDPParam._init_sharded_param`` of torch 2.13): a parameter of 8 rows over 64 ranks becomes one of 64 rows. Each
    rank stores its padded part, the buffers of all-gathers and reduce-scatters have the padded size, and only ranks
    with rows have optimizer state.
    """
    lost: Counter[str] = Counter()
    totals = []
    for unit in units:
        real = padded = 0
        for name, shape in unit.items():
            numel, whole = prod(shape), prod(padded_shape(shape, shards))
            real, padded = real + numel, padded + whole
            if whole - numel >= SIGNIFICANT * whole > 0:
                lost[name] = whole - numel
        totals.append((real, padded))
    return Padding(
        real=sum(real for real, _ in totals),
        padded=sum(padded for _, padded in totals),
        largest=max((real for real, _ in totals), default=0),
        largest_padded=max((padded for _, padded in totals), default=0),
        names=tuple(name for name, _ in lost.most_common()),
    )


def with_padding_warning(plan: FsdpPlan, model: nn.Module) -> FsdpPlan:
    """Return the plan with a warning if much of what FSDP2 stores and communicates is padding.

    Args:
        model: the model that was planned, not sharded. Models that were sharded before ``prepare`` keep their shards.
    """
    if plan.backend != "fsdp2" or plan.pre_sharded or plan.mesh.shard == 1:
        return plan
    units = unit_shapes(plan, model)
    found = padding_of(units, plan.mesh.shard)
    if found.share < SIGNIFICANT or not found.names or found.padded - found.real < _LEAST_ELEMENTS:
        return plan
    return replace(plan, problems=(*plan.problems, _warning(plan, units, found)))


def _warning(plan: FsdpPlan, units: Shapes, found: Padding) -> Problem:
    shards, first = plan.mesh.shard, found.names[0]
    rows = next(unit[first][0] for unit in units if first in unit)
    part = -(-rows // shards)
    holding = -(-rows // part)
    empty = f"; {shards - holding:,} of the shards are empty" if holding < shards else ""
    return Problem(
        code="FSDP-W837",
        message=f"{found.share:.0%} of what FSDP2 stores and communicates is padding: it splits each parameter on its "
        f"first dimension into {shards:,} parts of equal size. {first} has {plural(rows, 'row')} and is padded to "
        f"{part * shards:,}{empty}. With padding, all units have {format_count(found.padded)} elements instead of "
        f"{format_count(found.real)}, and the largest one {format_count(found.largest_padded)} instead of "
        f"{format_count(found.largest)}. {_list_padded(found)}",
        fix=_remedy(plan, units),
        setting="mesh.shard",
        origin=plan.spec.origins.get("mesh.shard"),
    )


def _list_padded(found: Padding) -> str:
    """Return how many parameters are padded, and their names without the numbers of layers."""
    count = plural(len(found.names), "parameter has", "parameters have")
    kinds = list(dict.fromkeys(_NUMBER.sub("*", name) for name in found.names))
    return f"{count} at least {SIGNIFICANT:.0%} padding: {format_names(kinds)}."


def _remedy(plan: FsdpPlan, units: Shapes) -> str:
    """Return what to set: the largest shard group without much padding, or FSDP1, which pads whole units only."""
    flat = "set fsdp_version: 1, which shards all parameters of a unit as one flat tensor."
    for size in range(plan.mesh.shard - 1, 1, -1):
        if plan.world_size % size == 0 and (left := padding_of(units, size).share) < SIGNIFICANT:
            return (
                f"Set mesh.shard (parallelism_config_dp_shard_size) to {size}: with {plan.world_size // size} replicas "
                f"of {size} shards, {left:.0%} is padding, and each rank stores 1/{size} of the model. Or {flat}"
            )
    return flat[0].upper() + flat[1:]
