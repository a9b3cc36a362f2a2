"""The profile of one rank: the phases of its steps, its computation and its collectives, read from its trace."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

from hf_fsdp_plugin.estimate.results import CollectiveKind
from hf_fsdp_plugin.estimate.schedule import Interval, clip_intervals, merge_intervals, subtract_intervals, total_length
from hf_fsdp_plugin.observe.profile.trace import (
    BOUNDARY,
    GATHER,
    ISSUES,
    PHASE_MARKS,
    REDUCE,
    TORCH_UNIT_MARKS,
    UNIT,
    WAIT,
    Event,
    Phase,
    Trace,
)
from hf_fsdp_plugin.plan.names import canonical_name


@dataclass
class Sums:
    """Base of dataclasses of numbers that are added and scaled field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self)(**{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)})

    def scaled(self, factor: float) -> Self:
        return type(self)(**{each.name: getattr(self, each.name) * factor for each in fields(self)})


@dataclass(kw_only=True)
class Times(Sums):
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

    @property
    def communication_share(self) -> float:
        """The share of communication in computation plus communication, as in the usual table of a profile."""
        whole = self.compute + self.communication
        return self.communication / whole if whole else 0.0


class TimedCollective(NamedTuple):
    """One collective of a profiled step on one rank. Times are in seconds since the epoch.

    Attributes:
        unit: empty for the root; ``None`` if it belongs to no unit.
        phase: the phase in which it was called.
        arrived: when this rank took part in it: with gloo at the call, on a device when its kernel began.
        end: when its kernel ended; with gloo, when the call and the wait for it had ended.
        seconds: duration of its kernel, or of the call and the wait. A rank that arrives early waits for the last one.
        exposed: seconds of it during which nothing is computed.
    """

    kind: CollectiveKind
    unit: str | None
    step: int
    phase: Phase
    arrived: float
    end: float
    seconds: float
    exposed: float


class UnitSeconds(NamedTuple):
    """Seconds of one unit in one step, without its collectives: kernels of a device, or time of the CPU thread."""

    forward: float = 0.0
    recomputed: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """One rank's profile.

    Attributes:
        times: seconds of each phase, averaged over the steps.
        units: computation of each unit, averaged over the steps.
        profiled, unprofiled: wall-clock seconds of steps with and without the profiler.
        facts: values that the trace does not contain: groups of ranks, settings, sizes of units and free memory.
    """

    rank: int
    world_size: int
    host: str
    device: str
    num_steps: int
    times: Mapping[Phase, Times]
    calls: Sequence[TimedCollective]
    units: Mapping[str, UnitSeconds] = field(default_factory=dict)
    profiled: Sequence[float] = ()
    unprofiled: Sequence[float] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> Times:
        return sum(self.times.values(), Times())

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file of a rank, with a row of values for each call."""
        times = {phase: asdict(each) for phase, each in self.times.items()}
        return {**{each.name: getattr(self, each.name) for each in fields(self)}, "times": times}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> RankProfile:
        times = {phase: Times(**each) for phase, each in tree["times"].items()}
        units = {name: UnitSeconds(*each) for name, each in tree["units"].items()}
        return cls(
            **{**tree, "times": times, "calls": [TimedCollective(*row) for row in tree["calls"]], "units": units}
        )


def profile_of(
    trace: Trace,
    *,
    rank: int,
    world_size: int,
    host: str,
    device: str,
    units: Iterable[str] = (),
    skip: int = 0,
    most: int = 1000,
) -> RankProfile | None:
    """Return the profile of a rank's trace; ``None`` if the trace contains no complete step.

    Args:
        units: names of the units.
        skip: steps of the trace that warm the profiler up. They are used only if there are no others.
        most: number of steps after them that are used.
    """
    ends = [mark.end for mark in trace.marks if mark.name == BOUNDARY]
    if len(ends) < 2:
        return None
    skip = min(skip, len(ends) - 2)
    steps, clock = Steps(trace, ends[skip : skip + most + 1]), DeviceClock(trace)
    unit_of = UnitMarks(trace.marks, units)

    def context_of(time: float, thread: int | None) -> CallContext | None:
        segment = steps.at(time)
        return None if segment is None else (unit_of.at(time, thread), segment.step, segment.phase)

    activity = (_device_activity if trace.kernels else _cpu_activity)(trace, context_of)
    times: dict[Phase, Times] = {}
    for segment in steps.segments:
        found = activity.times_between(clock.at(segment.start), clock.at(segment.end))
        times[segment.phase] = times.get(segment.phase, Times()) + found
    return RankProfile(
        rank=rank,
        world_size=world_size,
        host=host,
        device=device,
        num_steps=steps.count,
        times={phase: each.scaled(1 / steps.count) for phase, each in times.items()},
        calls=activity.calls,
        units=_unit_seconds(trace, steps, activity, clock),
    )


class Segment(NamedTuple):
    """A part of a step in one phase, in times of the CPU."""

    phase: Phase
    step: int
    start: float
    end: float


class Steps:
    """The phases of the steps between boundaries, without gaps and in order.

    Args:
        boundaries: times of the CPU at which steps ended.
    """

    def __init__(self, trace: Trace, boundaries: Sequence[float]) -> None:
        marks = [(phase, mark) for mark in trace.marks for begin, phase in PHASE_MARKS if mark.name.startswith(begin)]
        marks.sort(key=lambda each: (each[1].start, -each[1].end))
        self.count = len(boundaries) - 1
        self.segments = [
            Segment(phase, step, low, high)
            for step, (start, end) in enumerate(pairwise(boundaries))
            for phase, low, high in _phases_between(marks, start, end)
        ]
        self._starts = [segment.start for segment in self.segments]

    def at(self, time: float) -> Segment | None:
        """Return the segment that contains a time; ``None`` outside of the steps."""
        index = bisect_right(self._starts, time) - 1
        return self.segments[index] if index >= 0 and time < self.segments[index].end else None


def _phases_between(
    marks: Iterable[tuple[Phase, Event]], start: float, end: float
) -> Iterator[tuple[Phase, float, float]]:
    """Fill the time between the outermost marks: between a forward and its backward, the loss is computed."""
    position, last = start, ""
    for phase, mark in marks:
        low, high = max(mark.start, position), min(mark.end, end)
        if high <= low:
            continue  # in another step, or inside of another mark
        if low > position:
            yield "forward" if (last, phase) == ("forward", "backward") else "other", position, low
        yield phase, low, high
        position, last = high, phase
    if end > position:
        yield "other", position, end


class DeviceClock:
    """Maps a time of the CPU to the time at which the device has finished what was launched until then.

    A device runs behind the CPU that launches its kernels. On the CPU, and while a device is idle, both are the same.
    """

    def __init__(self, trace: Trace) -> None:
        kernels = sorted(trace.kernels, key=lambda kernel: kernel.launched)
        self._launched = [kernel.launched for kernel in kernels]
        self._ends = list(accumulate((kernel.end for kernel in kernels), max))

    def at(self, time: float) -> float:
        index = bisect_right(self._launched, time)
        return max(time, self._ends[index - 1]) if index else time


CallContext = tuple[str | None, int, Phase]
"""Unit, step and phase of a collective."""
ContextOf = Callable[[float, int | None], CallContext | None]
"""Returns the context of a call from its time and its thread (``None`` for any); ``None`` outside of the steps."""


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What a rank did, as sets of intervals: of its device if the trace has kernels, else of the CPU.

    Attributes:
        compute: operations of CPU threads, or kernels of the device.
        communication: execution of collectives. On the CPU, the time that the thread which trains is inside of one.
        exposed: the part of ``communication`` during which nothing is computed.
    """

    compute: Sequence[Interval]
    communication: Sequence[Interval]
    exposed: Sequence[Interval]
    calls: Sequence[TimedCollective]

    def times_between(self, start: float, end: float) -> Times:
        sets = (self.compute, self.communication, self.exposed)
        compute, communication, exposed = (total_length(clip_intervals(each, start, end)) for each in sets)
        return Times(seconds=end - start, compute=compute, communication=communication, exposed=exposed)


def _device_activity(trace: Trace, context_of: ContextOf) -> Activity:
    collectives = [(kernel, kind) for kernel in trace.kernels if (kind := kernel.nccl_kind) is not None]
    compute = merge_intervals(
        _spans(kernel for kernel in trace.kernels if kernel.nccl_kind is None and not kernel.copies)
    )
    communication = merge_intervals(_spans(kernel for kernel, _ in collectives))
    calls = []
    for kernel, kind in collectives:
        if (context := context_of(kernel.launched, None)) is not None:
            seconds = kernel.end - kernel.start
            exposed = seconds - total_length(clip_intervals(compute, kernel.start, kernel.end))
            calls.append(TimedCollective(kind, *context, kernel.start, kernel.end, seconds, exposed))
    return Activity(
        compute=compute, communication=communication, exposed=subtract_intervals(communication, compute), calls=calls
    )


def _cpu_activity(trace: Trace, context_of: ContextOf) -> Activity:
    """Read the calls with gloo: a wait belongs to the last call before it that nothing has waited for."""
    waits = merge_intervals(_spans([*trace.waits, *(mark for mark in trace.marks if mark.name == WAIT)]))
    issues = _outermost(trace.issues)
    spans = [_spans([issue]) for issue in issues]
    called, pending = 0, []
    for wait in waits:
        while called < len(issues) and issues[called].start < wait[1]:
            pending.append(called)
            called += 1
        if pending:
            spans[pending.pop()].append(wait)
    calls = []
    for issue, blocked in zip(issues, spans, strict=True):
        if (context := context_of(issue.start, issue.thread)) is not None:
            seconds, end = total_length(merge_intervals(blocked)), blocked[-1][1]
            calls.append(TimedCollective(ISSUES[issue.name], *context, issue.start, end, seconds, seconds))
    inside = merge_intervals([*waits, *_spans(issues)])
    compute = subtract_intervals(merge_intervals(_spans(trace.ops)), inside)
    return Activity(compute=compute, communication=inside, exposed=inside, calls=calls)


def _outermost(issues: Iterable[Event]) -> list[Event]:
    """Return the issues that are not made by another one."""
    found: list[Event] = []
    ends: dict[int, float] = {}
    for issue in issues:
        if issue.end > ends.get(issue.thread, 0.0):
            found.append(issue)
            ends[issue.thread] = issue.end
    return found


class UnitMarks:
    """Finds the unit whose collective is called at a time.

    Args:
        units: the names of all units, to which FSDP2's names are mapped: it joins several modules by commas.
    """

    def __init__(self, marks: Iterable[Event], units: Iterable[str]) -> None:
        known = {frozenset(name.split(" + ")): name for name in units}
        self._marks: list[tuple[Event, str]] = []
        for mark in marks:
            if (written := _written_unit(mark.name)) is not None:
                modules = [canonical_name(part) for part in written.split(", ")]
                self._marks.append((mark, known.get(frozenset(modules), " + ".join(modules))))
        self._starts = [mark.start for mark, _ in self._marks]

    def at(self, time: float, thread: int | None) -> str | None:
        """Return the unit of the innermost mark; ``None`` if there is none."""
        last = bisect_right(self._starts, time)
        inside = (
            name
            for mark, name in reversed(self._marks[max(0, last - 4) : last])
            if mark.end >= time and thread in (None, mark.thread)
        )
        return next(inside, None)


def _written_unit(mark: str) -> str | None:
    for prefix in (GATHER, REDUCE):
        if mark.startswith(prefix):
            return mark.removeprefix(prefix)
    name, _, rest = mark.partition(" (")
    return rest.partition(")")[0] if name.strip() in TORCH_UNIT_MARKS else None


def _unit_seconds(trace: Trace, steps: Steps, activity: Activity, clock: DeviceClock) -> dict[str, UnitSeconds]:
    """Return the computation in the marks of each unit, which cover its forward and its recomputed forward."""
    found: dict[str, UnitSeconds] = {}
    for mark in trace.marks:
        segment = steps.at(mark.start) if mark.name.startswith(UNIT) else None
        if segment is None:
            continue
        times = activity.times_between(clock.at(mark.start), clock.at(mark.end))
        seconds = (times.compute if trace.kernels else times.seconds - times.exposed) / steps.count
        name = mark.name.removeprefix(UNIT)
        forward, recomputed = found.get(name, UnitSeconds())
        if segment.phase == "backward":
            found[name] = UnitSeconds(forward, recomputed + seconds)
        elif segment.phase == "forward":
            found[name] = UnitSeconds(forward + seconds, recomputed)
    return found


def _spans(events: Iterable[Event]) -> list[Interval]:
    return [(event.start, event.end) for event in events]
