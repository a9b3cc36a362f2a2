"""The profile of all ranks: phases, units, collectives, and the ranks for which the others wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from hf_fsdp_plugin.estimate.results import CollectiveKind, Moment
from hf_fsdp_plugin.observe.profile.rank_profile import RankProfile, StepCall, Times, UnitSeconds
from hf_fsdp_plugin.observe.profile.trace import PHASES, Phase

Sort = tuple[CollectiveKind, str | None, bool]
"""Kind, unit, and whether it is called in forward."""
Key = tuple[str, int, Sort, int]
"""Group of ranks, step, sort, and number of the call with these: the same collective on every rank."""


@dataclass(kw_only=True, slots=True)
class CallSums:
    """Collectives of one kind and phase, per step.

    Attributes:
        seconds, exposed: averages over the ranks.
        transfer: exposed seconds of the rank that waits least in each call. The rest is waiting for other ranks, which
            another collective would have to do instead.
    """

    calls: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0
    transfer: float = 0.0

    def __add__(self, other: CallSums) -> CallSums:
        return CallSums(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitProfile:
    """One unit.

    Attributes:
        order: its position in the order of the first all-gathers.
        forward_seconds, recomputed_seconds: its forward, and its forward in backward, averaged over the ranks.
    """

    name: str
    order: int
    gather_forward: CallSums
    gather_backward: CallSums
    reduce: CallSums
    forward_seconds: float
    recomputed_seconds: float

    @property
    def communication(self) -> CallSums:
        return self.gather_forward + self.gather_backward + self.reduce


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWait:
    """One rank as the others see it.

    Attributes:
        step_seconds: its step.
        compute_seconds: its computation in a step.
        late_seconds: time of a step by which it arrives after all other ranks of a collective, so that all others wait.
        last_share: share of the collectives at which it arrives last.
    """

    rank: int
    step_seconds: float
    compute_seconds: float
    late_seconds: float
    last_share: float


@dataclass(kw_only=True)
class RunProfile:
    """The profile of a run. Seconds and bytes are those of one step and one rank, averaged.

    Attributes:
        collectives: by kind.
        unprofiled_seconds: median step without the profiler; ``None`` if there was none.
        profiled_seconds: median step with the profiler, by the wall clock.
        memory: of the first rank.
        facts: of the first rank.
    """

    world_size: int
    num_ranks: int
    num_steps: int
    device: str
    times: Mapping[Phase, Times]
    units: Sequence[UnitProfile]
    collectives: Mapping[CollectiveKind, CallSums]
    ranks: Sequence[RankWait]
    profiled_seconds: float | None = None
    unprofiled_seconds: float | None = None
    rate_limited: float = 0.0
    memory: Sequence[Moment] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> Times:
        return sum(self.times.values(), Times())

    @property
    def overhead_seconds(self) -> float | None:
        """Seconds by which the profiler lengthens a step; may be negative if steps differ for other reasons."""
        if self.unprofiled_seconds is None or self.profiled_seconds is None:
            return None
        return self.profiled_seconds - self.unprofiled_seconds

    @property
    def peak(self) -> Moment | None:
        """The moment of the recorded step with the most memory of tensors; ``None`` if no memory was recorded."""
        return max(self.memory, key=lambda moment: moment.bytes, default=None)


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


@dataclass(slots=True)
class _Arrivals:
    """One collective over all ranks: the last two arrivals, and the least exposed time."""

    last: float
    rank: int
    before: float
    transfer: float
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
        self._ends = {key: first.began + call.end for key, call in _keyed(first)}
        self._num_ranks = 0
        self._times: dict[Phase, Times] = {}
        self._sums: dict[Sort, CallSums] = {}
        self._arrivals: dict[Key, _Arrivals] = {}
        self._order: dict[str, int] = {}
        self._units: dict[str, list[UnitSeconds]] = {}
        self._ranks: list[tuple[int, float, float]] = []
        self._wall: tuple[list[float], list[float]] = ([], [])
        self._rate_limited: list[float] = []

    def add(self, profile: RankProfile) -> None:
        self._num_ranks += 1
        shift = self._clock_shift(profile)
        for phase, times in profile.times.items():
            self._times[phase] = self._times.get(phase, Times()) + times
        for key, call in _keyed(profile):
            self._add_call(key, call, profile, profile.began + call.arrived - shift)
        for name, unit in profile.units.items():
            self._units.setdefault(name, []).append(unit)
        self._ranks.append((profile.rank, profile.total.seconds, profile.total.compute))
        self._rate_limited.append(profile.rate_limited)
        for sink, seconds in zip(self._wall, (profile.profiled, profile.unprofiled), strict=True):
            sink += [median(seconds)] if seconds else []

    def _clock_shift(self, profile: RankProfile) -> float:
        """Return the seconds by which the clock of another host is ahead: ranks finish a collective together."""
        if profile.host == self._first.host:
            return 0.0
        shifts = [profile.began + call.end - self._ends[key] for key, call in _keyed(profile) if key in self._ends]
        return median(shifts) if shifts else 0.0

    def _add_call(self, key: Key, call: StepCall, profile: RankProfile, arrived: float) -> None:
        if call.unit is not None:
            self._order.setdefault(call.unit, len(self._order))
        sums = self._sums.setdefault(key[2], CallSums())
        sums.calls += 1 / profile.num_steps
        sums.bytes += call.bytes / profile.num_steps
        sums.seconds += call.seconds / profile.num_steps
        sums.exposed += call.exposed / profile.num_steps
        if key in self._arrivals:
            self._arrivals[key].add(arrived, profile.rank, call.exposed)
        else:
            self._arrivals[key] = _Arrivals(arrived, profile.rank, float("-inf"), call.exposed)

    def finish(self) -> RunProfile:
        first, count = self._first, self._num_ranks
        for sums in self._sums.values():
            for name in ("calls", "bytes", "seconds", "exposed"):
                setattr(sums, name, getattr(sums, name) / count)
        for (_, _, sort, _), arrivals in self._arrivals.items():
            self._sums[sort].transfer += arrivals.transfer * arrivals.ranks / first.num_steps / count
        collectives: dict[CollectiveKind, CallSums] = {}
        for (kind, _, _), sums in self._sums.items():
            collectives[kind] = collectives.get(kind, CallSums()) + sums
        return RunProfile(
            world_size=first.world_size, num_ranks=count, num_steps=first.num_steps, device=first.device,
            times={phase: self._times[phase].scaled(1 / count) for phase in PHASES if phase in self._times},
            units=self._unit_profiles(), collectives=collectives, ranks=self._waits(),
            profiled_seconds=mean(self._wall[0]) if self._wall[0] else None,
            unprofiled_seconds=mean(self._wall[1]) if self._wall[1] else None,
            rate_limited=mean(self._rate_limited), memory=first.memory, facts=first.facts,
        )  # fmt: skip

    def _unit_profiles(self) -> list[UnitProfile]:
        found = []
        for name in sorted({*self._order, *self._units}, key=lambda name: self._order.get(name, len(self._order))):
            computes = self._units.get(name, [UnitSeconds()])
            reductions = [self._sums.get((kind, name, False), CallSums()) for kind in ("reduce_scatter", "all_reduce")]
            found.append(
                UnitProfile(
                    name=name,
                    order=self._order.get(name, len(self._order)),
                    gather_forward=self._sums.get(("all_gather", name, True), CallSums()),
                    gather_backward=self._sums.get(("all_gather", name, False), CallSums()),
                    reduce=reductions[0] + reductions[1],
                    forward_seconds=mean(unit.forward for unit in computes),
                    recomputed_seconds=mean(unit.recomputed for unit in computes),
                )
            )
        return found

    def _waits(self) -> list[RankWait]:
        late: Counter[int] = Counter()
        last: Counter[int] = Counter()
        for arrivals in self._arrivals.values():
            if arrivals.ranks > 1:
                late[arrivals.rank] += arrivals.last - arrivals.before  # type: ignore[assignment]
                last[arrivals.rank] += 1
        steps, calls = self._first.num_steps, sum(last.values()) or 1
        return [
            RankWait(
                rank=rank,
                step_seconds=seconds,
                compute_seconds=compute,
                late_seconds=late[rank] / steps,
                last_share=last[rank] / calls,
            )
            for rank, seconds, compute in self._ranks
        ]


def _keyed(profile: RankProfile) -> Iterable[tuple[Key, StepCall]]:
    """Yield the collectives with keys that are equal on all ranks that take part in one."""
    groups, counts = profile.facts.get("groups", {}), Counter[tuple[str, int, Sort]]()
    for call in profile.calls:
        group = groups.get(call.unit, "") if call.unit is not None else ""
        if call.kind == "all_reduce" and call.unit is not None:
            group = f"replicas of rank {profile.rank}"  # which other ranks take part is not recorded
        sort: Sort = (call.kind, call.unit, call.phase not in ("backward", "clipping", "optimizer"))
        counts[group, call.step, sort] += 1
        yield (group, call.step, sort, counts[group, call.step, sort]), call
