"""The profile of all ranks: phases, units, collectives, and the ranks for which the others wait."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, Final, NamedTuple

from hf_fsdp_plugin.estimate.results import CollectiveKind
from hf_fsdp_plugin.observe.profile.rank_profile import RankProfile, Sums, TimedCollective, Times, UnitSeconds
from hf_fsdp_plugin.observe.profile.trace import PHASES, Phase

Sort = tuple[CollectiveKind, str | None, bool]
"""Kind and unit of a collective, and whether it is called in forward."""
CallKey = tuple[str, int, Sort, int]
"""Group of ranks, step, sort, and number of the call with these: the same collective on every rank."""
_REDUCTIONS: Final[tuple[CollectiveKind, ...]] = ("reduce_scatter", "all_reduce")


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


@dataclass(frozen=True, kw_only=True)
class UnitProfile:
    """The computation and the collectives of one unit.

    Attributes:
        bytes: size of its gathered parameters.
        forward_seconds, recomputed_seconds: time of its forward and of its recomputed forward, averaged over the ranks.
    """

    name: str
    bytes: int
    gather_forward: CallSums
    gather_backward: CallSums
    reduce: CallSums
    forward_seconds: float
    recomputed_seconds: float

    @property
    def communication(self) -> CallSums:
        return self.gather_forward + self.gather_backward + self.reduce


@dataclass(frozen=True, kw_only=True)
class RankWait:
    """One rank as the others see it.

    Attributes:
        step_seconds: time of its step.
        compute_seconds: time of its computation in a step.
        late_seconds: time in a step during which all other ranks of a collective wait for this rank alone.
        last_share: share of the collectives at which it arrives last.
    """

    rank: int
    step_seconds: float
    compute_seconds: float
    late_seconds: float
    last_share: float


@dataclass(kw_only=True)
class RunProfile:
    """The profile of a run. Seconds are those of one step and one rank, averaged.

    Attributes:
        units: the units, in the order of their first all-gathers.
        collectives: the sums over the collectives of each kind.
        profiled_seconds, unprofiled_seconds: median step with and without the profiler, by the wall clock; ``None`` if
            there was none.
        facts: the ``facts`` of the first rank (:class:`~hf_fsdp_plugin.observe.profile.rank_profile.RankProfile`).
    """

    world_size: int
    num_ranks: int
    num_steps: int
    device: str
    times: Mapping[Phase, Times]
    units: Sequence[UnitProfile]
    collectives: Mapping[CollectiveKind, CallSums]
    ranks: Sequence[RankWait]
    profiled_seconds: float | None
    unprofiled_seconds: float | None
    facts: Mapping[str, Any]

    @property
    def total(self) -> Times:
        return sum(self.times.values(), Times())

    @property
    def overhead_seconds(self) -> float | None:
        """Seconds by which the profiler lengthens a step; may be negative if steps differ for other reasons."""
        if self.unprofiled_seconds is None or self.profiled_seconds is None:
            return None
        return self.profiled_seconds - self.unprofiled_seconds


class _Arrival(NamedTuple):
    """One rank in one collective. Its time is by the clock of the first rank's host."""

    time: float
    rank: int
    call: TimedCollective


def merge_ranks(profiles: Sequence[RankProfile]) -> RunProfile:
    """Return the profile of all ranks. Raises ``ValueError`` if there are no profiles."""
    if not profiles:
        raise ValueError("no rank has a profile")
    first = profiles[0]
    ends = {key: call.end for key, call in _keyed(first)}
    arrivals: dict[CallKey, list[_Arrival]] = {}
    unit_seconds: dict[str, list[UnitSeconds]] = {}
    for profile in profiles:
        ahead = _seconds_ahead(profile, first.host, ends)
        for key, call in _keyed(profile):
            arrivals.setdefault(key, []).append(_Arrival(call.arrived - ahead, profile.rank, call))
            if call.unit is not None:
                unit_seconds.setdefault(call.unit, [])
        for name, seconds in profile.units.items():
            unit_seconds.setdefault(name, []).append(seconds)
    sums = _sums_of(arrivals.items(), 1 / len(profiles) / first.num_steps)
    collectives: dict[CollectiveKind, CallSums] = {}
    for (kind, _, _), each in sums.items():
        collectives[kind] = collectives.get(kind, CallSums()) + each
    times = {
        phase: sum((each.times[phase] for each in profiles if phase in each.times), Times()).scaled(1 / len(profiles))
        for phase in PHASES
        if any(phase in each.times for each in profiles)
    }
    profiled = [median(each.profiled) for each in profiles if each.profiled]
    unprofiled = [median(each.unprofiled) for each in profiles if each.unprofiled]
    sizes = first.facts.get("units", {})
    return RunProfile(
        world_size=first.world_size,
        num_ranks=len(profiles),
        num_steps=first.num_steps,
        device=first.device,
        times=times,
        units=[
            UnitProfile(
                name=name,
                bytes=sizes.get(name, {}).get("bytes", 0),
                gather_forward=sums.get(("all_gather", name, True), CallSums()),
                gather_backward=sums.get(("all_gather", name, False), CallSums()),
                reduce=sum((sums.get((kind, name, False), CallSums()) for kind in _REDUCTIONS), CallSums()),
                forward_seconds=mean([unit.forward for unit in seconds] or [0.0]),
                recomputed_seconds=mean([unit.recomputed for unit in seconds] or [0.0]),
            )
            for name, seconds in unit_seconds.items()
        ],
        collectives=collectives,
        ranks=_waits(profiles, arrivals.values()),
        profiled_seconds=mean(profiled) if profiled else None,
        unprofiled_seconds=mean(unprofiled) if unprofiled else None,
        facts=first.facts,
    )


def _seconds_ahead(profile: RankProfile, host: str, ends: Mapping[CallKey, float]) -> float:
    """Return the seconds by which the clock of another host is ahead: ranks finish a collective together."""
    shifts = [call.end - ends[key] for key, call in _keyed(profile) if key in ends]
    return median(shifts) if shifts and profile.host != host else 0.0


def _sums_of(arrivals: Iterable[tuple[CallKey, Sequence[_Arrival]]], factor: float) -> dict[Sort, CallSums]:
    sums: dict[Sort, CallSums] = {}
    for (_, _, sort, _), of_call in arrivals:
        exposed = [arrival.call.exposed for arrival in of_call]
        sums[sort] = sums.get(sort, CallSums()) + CallSums(
            calls=len(of_call),
            seconds=sum(arrival.call.seconds for arrival in of_call),
            exposed=sum(exposed),
            transfer=min(exposed) * len(of_call),
        )
    return {sort: each.scaled(factor) for sort, each in sums.items()}


def _waits(profiles: Sequence[RankProfile], arrivals: Iterable[Sequence[_Arrival]]) -> list[RankWait]:
    late: dict[int, float] = defaultdict(float)
    last = Counter[int]()
    for of_call in arrivals:
        if len(of_call) > 1:
            before, latest = sorted(of_call, key=lambda arrival: arrival.time)[-2:]
            late[latest.rank] += latest.time - before.time
            last[latest.rank] += 1
    return [
        RankWait(
            rank=profile.rank,
            step_seconds=profile.total.seconds,
            compute_seconds=profile.total.compute,
            late_seconds=late[profile.rank] / profiles[0].num_steps,
            last_share=last[profile.rank] / max(1, last.total()),
        )
        for profile in profiles
    ]


def _keyed(profile: RankProfile) -> Iterator[tuple[CallKey, TimedCollective]]:
    """Yield the collectives with keys that are equal on all ranks that take part in one."""
    groups, counts = profile.facts.get("groups", {}), Counter[tuple[str, int, Sort]]()
    for call in profile.calls:
        group = groups.get(call.unit, "") if call.unit is not None else ""
        if call.kind == "all_reduce" and call.unit is not None:
            group = f"replicas of rank {profile.rank}"  # which other ranks take part is not recorded
        sort: Sort = (call.kind, call.unit, call.phase not in ("backward", "clipping", "optimizer"))
        counts[group, call.step, sort] += 1
        yield (group, call.step, sort, counts[group, call.step, sort]), call
