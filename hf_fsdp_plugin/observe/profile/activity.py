"""What a rank did in its trace: the phases of its steps, its computation, its collectives, and its memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hf_fsdp_plugin.estimate.results import CollectiveKind, MemoryKind, Moment
from hf_fsdp_plugin.estimate.schedule import Interval, clip, measure, subtract, union
from hf_fsdp_plugin.observe.profile.trace import (
    BOUNDARY,
    GATHER,
    PHASE_MARKS,
    REDUCE,
    SAMPLE,
    TORCH_PHASE_MARKS,
    TORCH_UNIT_MARKS,
    WAIT,
    Event,
    Issue,
    MemoryPoint,
    Phase,
    Trace,
    Work,
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a step in one phase, in seconds since the epoch."""

    phase: Phase
    start: float
    end: float


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


def read_boundaries(trace: Trace) -> list[float]:
    """Return the times of the CPU at which steps ended, the last of which ends the last complete step."""
    return [mark.end for mark in trace.marks if mark.name == BOUNDARY]


def read_steps(trace: Trace, boundaries: Sequence[float]) -> list[list[Segment]]:
    """Return the phases of each step between two boundaries, without gaps and in order, in times of the CPU."""
    marks = [(phase, mark) for mark in trace.marks if (phase := _phase_of(mark)) is not None]
    return [_divide(marks, start, end) for start, end in pairwise(boundaries)]


def on_device(segments: Sequence[Segment], clock: DeviceClock) -> list[Segment]:
    """Return phases in times of the device."""
    mapped = [Segment(each.phase, clock.at(each.start), clock.at(each.end)) for each in segments]
    return [segment for segment in mapped if segment.end > segment.start]


def _divide(marks: Sequence[tuple[Phase, Event]], start: float, end: float) -> list[Segment]:
    """Fill the time between the outermost marks: between a forward and its backward, the loss is computed."""
    segments: list[Segment] = []
    outer = _outermost_phases(marks, start, end)
    position = start
    for index, segment in enumerate(outer):
        if segment.start > position:
            after_forward = index > 0 and outer[index - 1].phase == "forward" and segment.phase == "backward"
            segments.append(Segment("forward" if after_forward else "other", position, segment.start))
        segments.append(segment)
        position = segment.end
    if end > position:
        segments.append(Segment("other", position, end))
    return segments


def _outermost_phases(marks: Sequence[tuple[Phase, Event]], start: float, end: float) -> list[Segment]:
    """Return the parts of the marks between two times, without those that are inside of another one."""
    found: list[Segment] = []
    for phase, mark in sorted(marks, key=lambda each: (each[1].start, -each[1].end)):
        low = max(mark.start, found[-1].end if found else start)
        if min(mark.end, end) > low:
            found.append(Segment(phase, low, min(mark.end, end)))
    return found


def _phase_of(mark: Event) -> Phase | None:
    if (phase := PHASE_MARKS.get(mark.name)) is not None:
        return phase
    return next((phase for prefix, phase in TORCH_PHASE_MARKS if mark.name.startswith(prefix)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One collective on one rank, in seconds since the epoch.

    Attributes:
        unit: name of the unit as the trace has it, empty for the root; ``None`` if it belongs to no unit.
        issued: when a CPU thread called it.
        arrived: when this rank took part in it: with gloo at the call, on a device when its kernel began.
        start, end: its execution on this rank. A rank that arrives early executes it until the last one has arrived.
        exposed: seconds of it during which nothing is computed.
        bytes: of its larger side on this rank; 0 if unknown.
    """

    kind: CollectiveKind
    unit: str | None
    issued: float
    arrived: float
    start: float
    end: float
    exposed: float
    bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """What a rank did, as sets of intervals.

    Attributes:
        compute: operations of CPU threads, or kernels of the device.
        communication: execution of collectives, and waiting for them.
        exposed: the part of ``communication`` during which nothing is computed. On the CPU this is the time that the
            thread which trains is inside a collective.
    """

    compute: Sequence[Interval]
    communication: Sequence[Interval]
    exposed: Sequence[Interval]
    calls: Sequence[Call]


def read_activity(trace: Trace) -> Activity:
    """Return computation and communication of a rank: of its device if the trace has kernels, else of the CPU."""
    return _device_activity(trace) if trace.kernels else _cpu_activity(trace)


def _device_activity(trace: Trace) -> Activity:
    compute = union((k.start, k.end) for k in trace.kernels if k.kind is None and not k.copies)
    units = UnitMarks(trace.marks)
    calls = []
    for kernel in trace.kernels:
        if kernel.kind is None:
            continue
        spans = [(kernel.start, kernel.end)]
        exposed = measure(subtract(spans, clip(compute, kernel.start, kernel.end)))
        calls.append(
            Call(
                kind=kernel.kind, unit=units.at(kernel.launched, None), issued=kernel.launched, arrived=kernel.start,
                start=kernel.start, end=kernel.end, exposed=exposed, bytes=kernel.bytes,
            )
        )  # fmt: skip
    communication = union((call.start, call.end) for call in calls)
    return Activity(compute=compute, communication=communication, exposed=subtract(communication, compute), calls=calls)


def _cpu_activity(trace: Trace) -> Activity:
    waits = union([*_spans(trace.waits), *_spans(mark for mark in trace.marks if mark.name == WAIT)])
    issues = _outermost_issues(trace.issues)
    blocked = union([*waits, *((issue.start, issue.end) for issue in issues)])
    compute = subtract(union(_spans(trace.ops)), blocked)
    units = UnitMarks(trace.marks)
    works = _match(issues, trace.works)
    ends = [work.end if work is not None else issue.end for issue, work in zip(issues, works, strict=True)]
    exposed = [issue.end - issue.start for issue in issues]
    for wait in waits:
        if (index := _waited_for(wait, issues, ends)) is not None:
            exposed[index] += measure(subtract([wait], [(issues[index].start, issues[index].end)]))
    calls = [
        Call(
            kind=issue.kind, unit=units.at(issue.start, issue.thread), issued=issue.start, arrived=issue.start,
            start=work.start if work is not None else issue.start, end=max(end, issue.start), exposed=exposed[index],
            bytes=issue.elements * (issue.item_bytes or (work.item_bytes if work is not None else 0)),
        )
        for index, (issue, work, end) in enumerate(zip(issues, works, ends, strict=True))
    ]  # fmt: skip
    communication = union([*((call.start, call.end) for call in calls), *blocked])
    return Activity(compute=compute, communication=communication, exposed=blocked, calls=calls)


def _outermost_issues(issues: Sequence[Issue]) -> list[Issue]:
    """Return the issues that are not made by another one."""
    found: list[Issue] = []
    ends: dict[int, float] = {}
    for issue in issues:
        if issue.end > ends.get(issue.thread, 0.0):
            found.append(issue)
            ends[issue.thread] = issue.end
    return found


def _match(issues: Sequence[Issue], works: Sequence[Work]) -> list[Work | None]:
    """Return the execution of each collective: gloo executes those of a group in the order of the calls.

    A work that began before the first call belongs to a call before the trace.
    """
    matched: list[Work | None] = []
    at = 0
    for issue in issues:
        while at < len(works) and works[at].start < issue.start:
            at += 1
        matched.append(works[at] if at < len(works) else None)
        at += 1
    return matched


def _waited_for(wait: Interval, issues: Sequence[Issue], ends: Sequence[float]) -> int | None:
    """Return the index of the collective whose end has ended a wait: of those called before, the last to end."""
    last = bisect_right(issues, wait[1], key=lambda issue: issue.start)
    near = [index for index in range(max(0, last - 16), last) if ends[index] <= wait[1]]
    return max(near, key=lambda index: ends[index], default=None)


class UnitMarks:
    """Finds the unit whose collective is called at a time."""

    def __init__(self, marks: Sequence[Event]) -> None:
        self._marks = [(mark, name) for mark in marks if (name := _unit_of(mark.name)) is not None]
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


def _unit_of(mark: str) -> str | None:
    for prefix in (GATHER, REDUCE):
        if mark.startswith(prefix):
            return mark.removeprefix(prefix)
    for name, _ in TORCH_UNIT_MARKS:
        if mark.partition(" ")[0] == name:
            return mark.partition(" (")[2].partition(")")[0]
    return None


def _spans(events: Iterable[Event]) -> list[Interval]:
    return [(event.start, event.end) for event in events]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Bytes that a rank has on its device at one moment."""

    params: int
    grads: int
    optimizer: int
    gathered: int


def memory_moments(trace: Trace, samples: Sequence[Sample]) -> list[Moment]:
    """Return, for the time between each two samples, the moment with the most memory.

    On a device the allocator's total is known; what is neither sharded nor gathered nor a gradient counts as
    activations. On the CPU only allocations since the step began are known, so that memory which existed before is that
    of the samples.

    Args:
        trace: of one step, with the memory of each allocation and an instant for each sample.
        samples: in the order of their instants.
    """
    boundaries = read_boundaries(trace)
    if len(boundaries) < 2 or not samples:
        return []
    began, ended = boundaries[0], boundaries[-1]
    on_device = any(point.on_device for point in trace.memory)
    points = [point for point in trace.memory if point.on_device == on_device and began <= point.time <= ended]
    times = [point.time for point in points]
    instants = [mark.start for mark in trace.marks if mark.name.startswith(SAMPLE)]
    phases = [segment for step in read_steps(trace, boundaries) for segment in step]
    units, moments = UnitMarks(trace.marks), []
    gathered = grads = float("inf")
    for index, (sample, time) in enumerate(zip(samples, instants, strict=False)):
        gathered, grads = min(gathered, sample.gathered), min(grads, sample.grads)
        until = instants[index + 1] if index + 1 < len(instants) else ended
        inside = points[bisect_left(times, time) : bisect_left(times, until)]
        peak = max(inside, key=lambda point: point.bytes, default=MemoryPoint(time, 0, on_device))
        new = int(sample.gathered - gathered + sample.grads - grads)
        known = sample.params + sample.grads + sample.optimizer + sample.gathered if on_device else new
        kinds: dict[MemoryKind, int] = {
            "params": sample.params, "grads": sample.grads, "optimizer": sample.optimizer,
            "activations": max(0, peak.bytes - known), "gathered": sample.gathered,
        }  # fmt: skip
        phase = next((segment.phase for segment in phases if segment.end > peak.time), "other")
        unit = units.at(time, None)
        where = f"{phase} of {unit or 'the root'}" if unit is not None else phase
        moments.append(Moment(where=where, bytes_by_kind=kinds, seconds=peak.time - began))
    return moments
