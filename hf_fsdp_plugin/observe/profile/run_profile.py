"""The profile of all ranks: phases, units, collectives, and the ranks for which the others wait."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from hf_fsdp_plugin.estimate.results import CollectiveKind
from hf_fsdp_plugin.observe.profile.rank_profile import RankProfile, Sums, TimedCollective, Times, UnitSeconds
from hf_fsdp_plugin.observe.profile.trace import PHASES, Phase

Sort = tuple[CollectiveKind, str | None, bool]
"""Kind and unit of a collective, and whether it is called in forward."""
CallKey = tuple[str, int, Sort, int]
"""Group of ranks, step, sort, and number of the call with these: the same collective on every rank."""


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


def merge_ranks(profiles: Iterable[RankProfile]) -> RunProfile:
    """Return the profile of all ranks. Reads each rank once; the memory grows with the number of collectives only.

    Raises:
        ValueError: there are no profiles.
    """
    merged: _Merge | None = None
    for profile in profiles:
        merged = merged or _Merge(profile)
        merged.add(profile)
    if merged is None:
        raise ValueError("no rank has a profile")
    return merged.finish()


@dataclass
class _Arrivals:
    """One collective over all ranks: the last two arrivals, and the least exposed time."""

    last: float
    rank: int
    transfer: float
    before: float = float("-inf")
    ranks: int = 1

    def add(self, arrived: float, rank: int, exposed: float) -> None:
        self.ranks += 1
        self.transfer = min(self.transfer, exposed)
        if arrived > self.last:
            self.last, self.rank, self.before = arrived, rank, self.last
        else:
            self.before = max(self.before, arrived)


class _Merge:
    def __init__(self, first: RankProfile) -> None:
        self._first = first
        self._ends = {key: call.end for key, call in _keyed(first)}
        self._times: dict[Phase, Times] = defaultdict(Times)
        self._sums: dict[Sort, CallSums] = defaultdict(CallSums)
        self._arrivals: dict[CallKey, _Arrivals] = {}
        self._units: dict[str, list[UnitSeconds]] = {}
        self._ranks: list[tuple[int, Times]] = []
        self._profiled: list[float] = []
        self._unprofiled: list[float] = []

    def add(self, profile: RankProfile) -> None:
        ahead = self._clock_ahead(profile)
        for phase, times in profile.times.items():
            self._times[phase] += times
        for key, call in _keyed(profile):
            if call.unit is not None:
                self._units.setdefault(call.unit, [])
            sums = self._sums[key[2]]
            sums.calls += 1
            sums.seconds += call.seconds
            sums.exposed += call.exposed
            if key in self._arrivals:
                self._arrivals[key].add(call.arrived - ahead, profile.rank, call.exposed)
            else:
                self._arrivals[key] = _Arrivals(call.arrived - ahead, profile.rank, call.exposed)
        for name, unit in profile.units.items():
            self._units.setdefault(name, []).append(unit)
        self._ranks.append((profile.rank, profile.total))
        self._profiled += [median(profile.profiled)] if profile.profiled else []
        self._unprofiled += [median(profile.unprofiled)] if profile.unprofiled else []

    def _clock_ahead(self, profile: RankProfile) -> float:
        """Return the seconds by which the clock of another host is ahead: ranks finish a collective together."""
        if profile.host == self._first.host:
            return 0.0
        shifts = [call.end - self._ends[key] for key, call in _keyed(profile) if key in self._ends]
        return median(shifts) if shifts else 0.0

    def finish(self) -> RunProfile:
        first, count = self._first, len(self._ranks)
        for (_, _, sort, _), arrivals in self._arrivals.items():
            self._sums[sort].transfer += arrivals.transfer * arrivals.ranks
        sums = {sort: each.scaled(1 / count / first.num_steps) for sort, each in self._sums.items()}
        collectives: dict[CollectiveKind, CallSums] = {}
        for (kind, _, _), each in sums.items():
            collectives[kind] = collectives.get(kind, CallSums()) + each
        return RunProfile(
            world_size=first.world_size,
            num_ranks=count,
            num_steps=first.num_steps,
            device=first.device,
            times={phase: self._times[phase].scaled(1 / count) for phase in PHASES if phase in self._times},
            units=[self._unit_profile(name, sums) for name in self._units],
            collectives=collectives,
            ranks=list(self._waits()),
            profiled_seconds=mean(self._profiled) if self._profiled else None,
            unprofiled_seconds=mean(self._unprofiled) if self._unprofiled else None,
            facts=first.facts,
        )

    def _unit_profile(self, name: str, sums: Mapping[Sort, CallSums]) -> UnitProfile:
        def of(kind: CollectiveKind, in_forward: bool = False) -> CallSums:
            return sums.get((kind, name, in_forward), CallSums())

        seconds = self._units[name] or [UnitSeconds()]
        return UnitProfile(
            name=name,
            bytes=self._first.facts.get("units", {}).get(name, {}).get("bytes", 0),
            gather_forward=of("all_gather", True),
            gather_backward=of("all_gather"),
            reduce=of("reduce_scatter") + of("all_reduce"),
            forward_seconds=mean(unit.forward for unit in seconds),
            recomputed_seconds=mean(unit.recomputed for unit in seconds),
        )

    def _waits(self) -> Iterator[RankWait]:
        late: dict[int, float] = defaultdict(float)
        last = Counter[int]()
        for arrivals in self._arrivals.values():
            if arrivals.ranks > 1:
                late[arrivals.rank] += arrivals.last - arrivals.before
                last[arrivals.rank] += 1
        for rank, total in self._ranks:
            yield RankWait(
                rank=rank,
                step_seconds=total.seconds,
                compute_seconds=total.compute,
                late_seconds=late[rank] / self._first.num_steps,
                last_share=last[rank] / max(1, last.total()),
            )


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
