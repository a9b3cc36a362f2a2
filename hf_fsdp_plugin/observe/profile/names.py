"""Names of units in a trace, and short names of groups of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from hf_fsdp_plugin.observe.profile.rank_profile import RankProfile, StepCall
from hf_fsdp_plugin.plan.names import canonical_name


def canonical_units(
    profile: RankProfile, units: Iterable[str], parts: Mapping[str, int] = MappingProxyType({})
) -> RankProfile:
    """Return the profile with the names of `units`. FSDP2 joins the names of several modules by commas.

    Args:
        parts: number of shards of the units whose all-gathers have the size of a shard in the trace: those of FSDP1
            with gloo, which gathers into a list of tensors, of which the trace has no shapes.
    """
    known = {frozenset(name.split(" + ")): name for name in units}

    def name_of(written: str | None) -> str | None:
        if written is None:
            return None
        parts = [canonical_name(part) for part in written.split(", ")]
        return known.get(frozenset(parts), " + ".join(parts))

    def place(where: str) -> str:
        phase, joined, unit = where.partition(" of ")
        return f"{phase} of {name_of(unit)}" if joined and unit != "the root" else where

    def renamed(call: StepCall) -> StepCall:
        unit = name_of(call.unit)
        factor = parts.get(unit, 1) if unit is not None and call.kind == "all_gather" else 1
        return replace(call, unit=unit, bytes=call.bytes * factor)

    return replace(
        profile,
        calls=[renamed(call) for call in profile.calls],
        memory=tuple(replace(moment, where=place(moment.where)) for moment in profile.memory),
    )


def rank_range(ranks: Sequence[int]) -> str:
    """Return a name of constant length for ranks at equal distances: ``first:step:size``; empty for none."""
    if not ranks:
        return ""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if list(ranks) == list(range(ranks[0], ranks[0] + step * len(ranks), step)):
        return f"{ranks[0]}:{step}:{len(ranks)}"
    return f"{ranks[0]}:?:{len(ranks)}"
