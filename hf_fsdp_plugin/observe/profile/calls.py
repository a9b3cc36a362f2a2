"""The collectives of one rank in its trace: kind, unit, times, bytes, and how long the computation waited for each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hf_fsdp_plugin.estimate.intervals import Interval, clip, measure, subtract, union
from hf_fsdp_plugin.estimate.results import CollectiveKind
from hf_fsdp_plugin.observe.profile.marks import GATHER, REDUCE, TORCH_UNIT_MARKS, WAIT
from hf_fsdp_plugin.observe.profile.trace import Event, Issue, Trace, Work


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
    issues = _outermost(trace.issues)
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


def _outermost(issues: Sequence[Issue]) -> list[Issue]:
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
