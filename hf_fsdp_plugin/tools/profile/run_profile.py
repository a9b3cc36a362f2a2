"""The profile of all ranks: phases, units, collectives and slow ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any, NamedTuple

from hf_fsdp_plugin.tools.plan.estimate.types import CollectiveKind
from hf_fsdp_plugin.tools.profile.rank_profile import PHASES, RankProfile, Sums, TimedCollective, Times, UnitSeconds

Sort = tuple[CollectiveKind, str | None, bool]
"""Kind and unit of a collective, and whether it is called in forward."""
CallKey = tuple[str, int, Sort, int]
"""Group of ranks, step, sort, and number of the call with these: the same collective on every rank."""
RunProfile = Mapping[str, Any]
"""The profile of a run, as ``profile.json`` contains it (docs/json.schema.json). Seconds are those of one step and one
rank, averaged. ``units`` are in the order of their first all-gathers.
"""


@dataclass(kw_only=True)
class CallSums(Sums):
    """Collectives of one kind and phase, per step.

    Attributes:
        seconds, exposed: averages over the ranks.
        transfer: exposed seconds of the rank that waits least in each call. The rest is waiting for other ranks, which
            another collective would have to do instead.
    """

    calls: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0
    transfer: float = 0.0


class _Arrival(NamedTuple):
    """One rank in one collective. Its time is by the clock of the first rank's host."""

    time: float
    rank: int
    call: TimedCollective


def merge_ranks(ranks: Sequence[RankProfile]) -> RunProfile:
    """Return the profile of all ranks. Raises ``ValueError`` if there are none."""
    if not ranks:
        raise ValueError("no rank has a profile")
    first = ranks[0]
    ends = {key: call.end for key, call in _keyed(first)}
    arrivals: dict[CallKey, list[_Arrival]] = defaultdict(list)
    unit_seconds: dict[str, list[UnitSeconds]] = {}
    for rank in ranks:
        # Ranks finish a collective together, which shows by how much the clock of another host is ahead.
        shifts = [call.end - ends[key] for key, call in _keyed(rank) if key in ends]
        ahead = median(shifts) if shifts and rank.host != first.host else 0.0
        for key, call in _keyed(rank):
            arrivals[key].append(_Arrival(call.arrived - ahead, rank.rank, call))
            if call.unit is not None:
                unit_seconds.setdefault(call.unit, [])
        for name, of_unit in rank.units.items():
            unit_seconds.setdefault(name, []).append(of_unit)
    sums: dict[Sort, CallSums] = defaultdict(CallSums)
    collectives: dict[CollectiveKind, CallSums] = defaultdict(CallSums)
    for (_, _, sort, _), of_call in arrivals.items():
        exposed = [arrival.call.exposed for arrival in of_call]
        seconds, transfer = sum(arrival.call.seconds for arrival in of_call), min(exposed) * len(of_call)
        added = CallSums(calls=len(of_call), seconds=seconds, exposed=sum(exposed), transfer=transfer)
        sums[sort] += added.scaled(1 / len(ranks) / first.num_steps)
        collectives[sort[0]] += added.scaled(1 / len(ranks) / first.num_steps)
    times = {
        phase: sum((rank.times[phase] for rank in ranks if phase in rank.times), Times()).scaled(1 / len(ranks))
        for phase in PHASES
        if any(phase in rank.times for rank in ranks)
    }
    return {
        "world_size": first.world_size,
        "num_ranks": len(ranks),
        "num_steps": first.num_steps,
        "device": first.device,
        "phases": {phase: each.to_json() for phase, each in times.items()},
        "total": sum(times.values(), Times()).to_json(),
        "overhead": _overhead(ranks),
        "collectives": {kind: asdict(each) for kind, each in collectives.items()},
        "units": [
            {
                "name": name,
                "bytes": first.facts.get("units", {}).get(name, {}).get("bytes", 0),
                "gather_forward": asdict(sums["all_gather", name, True]),
                "gather_backward": asdict(sums["all_gather", name, False]),
                "reduce": asdict(sums["reduce_scatter", name, False] + sums["all_reduce", name, False]),
                "forward_seconds": mean([each.forward for each in of_unit] or [0.0]),
                "recomputed_seconds": mean([each.recomputed for each in of_unit] or [0.0]),
            }
            for name, of_unit in unit_seconds.items()
        ],
        "ranks": list(_waits(ranks, arrivals.values())),
    }


def _overhead(ranks: Sequence[RankProfile]) -> dict[str, float | None]:
    """Return the median steps with and without the profiler, by the wall clock, and their difference.

    The difference is negative if steps differ for other reasons. A value is ``None`` without such steps.
    """
    profiled = [median(rank.profiled) for rank in ranks if rank.profiled]
    unprofiled = [median(rank.unprofiled) for rank in ranks if rank.unprofiled]
    return {
        "profiled_seconds": mean(profiled) if profiled else None,
        "unprofiled_seconds": mean(unprofiled) if unprofiled else None,
        "seconds": mean(profiled) - mean(unprofiled) if profiled and unprofiled else None,
    }


def _waits(ranks: Sequence[RankProfile], arrivals: Iterable[Sequence[_Arrival]]) -> Iterator[dict[str, Any]]:
    """Yield the step of each rank, and how long all other ranks of a collective wait for this rank alone."""
    late: dict[int, float] = defaultdict(float)
    last = Counter[int]()
    for of_call in arrivals:
        if len(of_call) > 1:
            before, latest = sorted(of_call, key=lambda arrival: arrival.time)[-2:]
            late[latest.rank] += latest.time - before.time
            last[latest.rank] += 1
    for rank in ranks:
        yield {
            "rank": rank.rank,
            "step_seconds": rank.total.seconds,
            "compute_seconds": rank.total.compute,
            "late_seconds": late[rank.rank] / ranks[0].num_steps,
            "last_share": last[rank.rank] / max(1, last.total()),
        }


def _keyed(rank: RankProfile) -> Iterator[tuple[CallKey, TimedCollective]]:
    """Yield the collectives with keys that are equal on all ranks that take part in one."""
    units, counts = rank.facts.get("units", {}), Counter[tuple[str, int, Sort]]()
    for call in rank.calls:
        group = units.get(call.unit, {}).get("group", "")
        if call.kind == "all_reduce" and call.unit is not None:
            group = f"replicas of rank {rank.rank}"  # which other ranks take part is not recorded
        sort: Sort = (call.kind, call.unit, call.phase not in ("backward", "clipping", "optimizer"))
        counts[group, call.step, sort] += 1
        yield (group, call.step, sort, counts[group, call.step, sort]), call
