"""Names of units in a trace, and short names of groups of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hf_fsdp_plugin.observe.profile.rank_profile import RankProfile
from hf_fsdp_plugin.plan.names import canonical_name


def canonical_units(profile: RankProfile, units: Iterable[str]) -> RankProfile:
    """Return the profile with the names of `units`. FSDP2 joins the names of several modules by commas."""
    known = {frozenset(name.split(" + ")): name for name in units}

    def name_of(written: str | None) -> str | None:
        if written is None:
            return None
        parts = [canonical_name(part) for part in written.split(", ")]
        return known.get(frozenset(parts), " + ".join(parts))

    def place(where: str) -> str:
        phase, joined, unit = where.partition(" of ")
        return f"{phase} of {name_of(unit)}" if joined and unit != "the root" else where

    return replace(
        profile,
        calls=[replace(call, unit=name_of(call.unit)) for call in profile.calls],
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
