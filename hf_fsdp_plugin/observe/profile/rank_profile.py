"""The profile of one rank: what it writes to its file, a few numbers for each phase and each collective."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from hf_fsdp_plugin.estimate.results import Moment
from hf_fsdp_plugin.estimate.schedule import clip, measure
from hf_fsdp_plugin.observe.profile.activity import (
    Activity,
    Call,
    DeviceClock,
    Segment,
    on_device,
    read_activity,
    read_boundaries,
    read_steps,
)
from hf_fsdp_plugin.observe.profile.trace import RATE_LIMITER, UNIT, Phase, Trace
from hf_fsdp_plugin.plan.names import canonical_name


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of a phase.

    Attributes:
        compute: computation.
        communication: collectives, whether or not something is computed meanwhile.
        exposed: the part of ``communication`` during which nothing is computed.
    """

    seconds: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0

    @property
    def idle(self) -> float:
        """Neither computation nor communication: Python, launches of kernels, waiting for data."""
        return max(0.0, self.seconds - self.compute - self.exposed)

    def __add__(self, other: Times) -> Times:
        return Times(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})

    def scaled(self, factor: float) -> Times:
        return Times(**{name: getattr(self, name) * factor for name in self.__slots__})


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCall(Call):
    """One collective of a profiled step, in seconds since the first profiled step began on this rank."""

    step: int
    phase: Phase


_CALL_FIELDS = tuple(each.name for each in fields(StepCall))


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSeconds:
    """Seconds of one unit in one step, without its collectives: kernels of a device, or time of the CPU thread."""

    forward: float = 0.0
    recomputed: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProfile:
    """One rank's profile.

    Attributes:
        began: when the first profiled step began, in seconds since the epoch.
        times: seconds of each phase, averaged over the steps.
        units: computation of each unit, averaged over the steps.
        rate_limited: seconds of a step in which FSDP1 waits before an all-gather (``limit_all_gathers``).
        profiled, unprofiled: wall-clock seconds of steps with and without the profiler.
        memory: moments of one step, ``Moment.seconds`` since the step began.
        facts: what is needed beside the trace; see ``integrations.profiling``.
    """

    rank: int
    world_size: int
    host: str
    device: str
    began: float
    num_steps: int
    times: Mapping[Phase, Times]
    calls: Sequence[StepCall]
    units: Mapping[str, UnitSeconds] = field(default_factory=dict)
    rate_limited: float = 0.0
    profiled: Sequence[float] = ()
    unprofiled: Sequence[float] = ()
    memory: Sequence[Moment] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> Times:
        return sum(self.times.values(), Times())

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file of a rank, with a row of values for each call."""
        return {
            **{each.name: getattr(self, each.name) for each in fields(self)},
            "times": {phase: asdict(times) for phase, times in self.times.items()},
            "calls": [[getattr(call, name) for name in _CALL_FIELDS] for call in self.calls],
            "units": {name: asdict(unit) for name, unit in self.units.items()},
            "memory": [asdict(moment) for moment in self.memory],
        }

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> RankProfile:
        return cls(
            **{
                **tree,
                "times": {phase: Times(**times) for phase, times in tree["times"].items()},
                "calls": [StepCall(**dict(zip(_CALL_FIELDS, row, strict=True))) for row in tree["calls"]],
                "units": {name: UnitSeconds(**unit) for name, unit in tree["units"].items()},
                "memory": tuple(Moment(**moment) for moment in tree["memory"]),
            }
        )


def profile_of(
    trace: Trace, *, rank: int, world_size: int, host: str, device: str, skip: int = 0, most: int | None = None
) -> RankProfile | None:
    """Return the profile of a rank's trace; ``None`` if the trace contains no complete step.

    Args:
        skip: steps of the trace that warm the profiler up. They are used only if there are no others.
        most: number of steps after them that are used.
    """
    boundaries = read_boundaries(trace)
    if len(boundaries) < 2:
        return None
    skip = min(skip, len(boundaries) - 2)
    boundaries = boundaries[skip:] if most is None else boundaries[skip : skip + most + 1]
    clock, activity = DeviceClock(trace), read_activity(trace)
    steps = read_steps(trace, boundaries)
    device_steps = [on_device(segments, clock) for segments in steps]
    began = device_steps[0][0].start
    times: dict[Phase, Times] = {}
    for segment in (segment for step in device_steps for segment in step):
        times[segment.phase] = times.get(segment.phase, Times()) + _times_of(segment, activity)
    return RankProfile(
        rank=rank, world_size=world_size, host=host, device=device, began=began,
        num_steps=len(steps),
        times={phase: each.scaled(1 / len(steps)) for phase, each in times.items()},
        calls=list(_calls_in(activity.calls, steps, began)), units=_unit_seconds(trace, steps, activity, clock),
        rate_limited=sum(
            mark.end - mark.start
            for mark in trace.marks
            if mark.name == RATE_LIMITER and boundaries[0] <= mark.start < boundaries[-1]
        ) / len(steps),
    )  # fmt: skip


def _times_of(segment: Segment, activity: Activity) -> Times:
    def within(intervals: Sequence[tuple[float, float]]) -> float:
        return measure(clip(intervals, segment.start, segment.end))

    return Times(
        seconds=segment.end - segment.start,
        compute=within(activity.compute),
        communication=within(activity.communication),
        exposed=within(activity.exposed),
    )


def _calls_in(calls: Sequence[Call], steps: Sequence[Sequence[Segment]], began: float) -> list[StepCall]:
    """Return the collectives that were called in a step, with the phase in which they were called."""
    segments = [(segment, number) for number, step in enumerate(steps) for segment in step]
    starts = [segment.start for segment, _ in segments]
    found = []
    for call in calls:
        at = bisect_right(starts, call.issued) - 1
        if at < 0 or call.issued >= segments[at][0].end:
            continue
        found.append(
            StepCall(
                step=segments[at][1], phase=segments[at][0].phase, kind=call.kind, unit=call.unit, bytes=call.bytes,
                issued=call.issued - began, arrived=call.arrived - began, start=call.start - began,
                end=call.end - began, exposed=call.exposed,
            )
        )  # fmt: skip
    return found


def _unit_seconds(
    trace: Trace, steps: Sequence[Sequence[Segment]], activity: Activity, clock: DeviceClock
) -> dict[str, UnitSeconds]:
    """Return the computation in the marks of each unit, which cover its forward and its recomputed forward."""
    segments = [segment for step in steps for segment in step]
    starts = [segment.start for segment in segments]
    found: dict[str, UnitSeconds] = {}
    for mark in trace.marks:
        at = bisect_right(starts, mark.start) - 1
        if not mark.name.startswith(UNIT) or at < 0 or mark.start >= segments[at].end:
            continue
        start, end = clock.at(mark.start), clock.at(mark.end)
        if trace.kernels:
            seconds = measure(clip(activity.compute, start, end)) / len(steps)
        else:
            seconds = (end - start - measure(clip(activity.exposed, start, end))) / len(steps)
        name, unit = mark.name.removeprefix(UNIT), found.get(mark.name.removeprefix(UNIT), UnitSeconds())
        if segments[at].phase == "backward":
            found[name] = replace(unit, recomputed=unit.recomputed + seconds)
        elif segments[at].phase == "forward":
            found[name] = replace(unit, forward=unit.forward + seconds)
    return found


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
