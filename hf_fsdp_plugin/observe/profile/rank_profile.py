"""The profile of one rank: the phases of its steps, its computation and its collectives, read from its trace."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from typing import Any, Generic, NamedTuple, Self, TypeVar

from hf_fsdp_plugin.estimate.results import CollectiveKind
from hf_fsdp_plugin.estimate.schedule import Interval, clip_intervals, merge_intervals, subtract_intervals, total_length
from hf_fsdp_plugin.observe.profile import trace as traces
from hf_fsdp_plugin.observe.profile.trace import Event, Phase, Trace
from hf_fsdp_plugin.plan.names import canonical_name

T = TypeVar("T")


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

    def to_json(self) -> dict[str, float]:
        names = ("compute", "communication", "exposed", "idle")
        seconds = {f"{name}_seconds": getattr(self, name) for name in names}
        return {"seconds": self.seconds, **seconds, "communication_share": self.communication_share}


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
    """One rank's profile. Its file contains the fields as JSON.

    Attributes:
        num_made: optimizer steps that the script has made.
        num_steps: steps that were analyzed; 0 if none was complete.
        times: seconds of each phase, averaged over the steps.
        units: computation of each unit, averaged over the steps.
        profiled, unprofiled: wall-clock seconds of steps with and without the profiler.
        facts: values that the trace does not contain: the batch, settings, and sizes and ranks of units.
    """

    rank: int
    world_size: int
    host: str
    device: str
    num_made: int = 0
    num_steps: int = 0
    times: Mapping[Phase, Times] = field(default_factory=dict)
    calls: Sequence[TimedCollective] = ()
    units: Mapping[str, UnitSeconds] = field(default_factory=dict)
    profiled: Sequence[float] = ()
    unprofiled: Sequence[float] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> Times:
        return sum(self.times.values(), Times())

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> RankProfile:
        times = {phase: Times(**each) for phase, each in tree["times"].items()}
        calls = [TimedCollective(*each) for each in tree["calls"]]
        units = {name: UnitSeconds(*each) for name, each in tree["units"].items()}
        return cls(**{**tree, "times": times, "calls": calls, "units": units})


def profile_of(
    trace: Trace, *, unit_names: Iterable[str] = (), skip: int = 0, most: int = 1000, **more: Any
) -> RankProfile:
    """Return the profile of a rank's trace: of its device if the trace has kernels, else of the CPU.

    On the CPU, communication is the time that the thread which trains is inside of a collective or waits for it.

    Args:
        unit_names: names of the units.
        skip: steps of the trace that warm the profiler up. They are used only if there are no others.
        most: number of steps after them that are used.
        more: the fields of the profile that the trace does not contain.
    """
    ends = [mark.end for mark in trace.marks if mark.name == traces.BOUNDARY]
    if len(ends) < 2:
        return RankProfile(**more)
    skip = min(skip, len(ends) - 2)
    segments = _segments(trace, ends[skip : skip + most + 1])
    num_steps = segments[-1].step + 1
    segment_at = Spans([(segment.start, segment.end, None, segment) for segment in segments])
    unit_at = Spans(_unit_marks(trace.marks, unit_names))
    compute, communication, collectives = (_device_activity if trace.kernels else _cpu_activity)(trace)
    exposed = subtract_intervals(communication, compute)
    device_time = _device_clock(trace)

    def times_between(start: float, end: float) -> Times:
        start, end = device_time(start), device_time(end)
        computed, called, waited = (
            total_length(clip_intervals(each, start, end)) for each in (compute, communication, exposed)
        )
        return Times(seconds=end - start, compute=computed, communication=called, exposed=waited)

    times: dict[Phase, Times] = {}
    for segment in segments:
        times[segment.phase] = times.get(segment.phase, Times()) + times_between(segment.start, segment.end)
    units: dict[str, UnitSeconds] = {}
    for mark in trace.marks:
        inside = segment_at.find(mark.start) if mark.name.startswith(traces.UNIT) else None
        if inside is not None and inside.phase in ("forward", "backward"):
            found, name = times_between(mark.start, mark.end), mark.name.removeprefix(traces.UNIT)
            seconds = (found.compute if trace.kernels else found.seconds - found.exposed) / num_steps
            forward, recomputed = units.get(name, UnitSeconds())
            if inside.phase == "forward":
                units[name] = UnitSeconds(forward + seconds, recomputed)
            else:
                units[name] = UnitSeconds(forward, recomputed + seconds)
    calls = []
    for each in collectives:
        if (inside := segment_at.find(each.called)) is not None:
            spans = merge_intervals(each.spans)
            seconds = total_length(spans)
            hidden = sum(total_length(clip_intervals(compute, *span)) for span in spans)
            context = unit_at.find(each.called, each.thread), inside.step, inside.phase
            calls.append(TimedCollective(each.kind, *context, spans[0][0], spans[-1][1], seconds, seconds - hidden))
    times = {phase: each.scaled(1 / num_steps) for phase, each in times.items()}
    return RankProfile(num_steps=num_steps, times=times, calls=calls, units=units, **more)


class Spans(Generic[T]):
    """Values of spans of time, sorted by start: start, end, thread and value."""

    def __init__(self, spans: Sequence[tuple[float, float, int | None, T]]) -> None:
        self._spans, self._starts = spans, [span[0] for span in spans]

    def find(self, time: float, thread: int | None = None) -> T | None:
        """Return the value of the innermost span that contains a time, of a thread if one is given."""
        last = bisect_right(self._starts, time)
        for _, end, own, value in reversed(self._spans[max(0, last - 4) : last]):
            if time < end and (thread is None or own == thread):
                return value
        return None


class Segment(NamedTuple):
    """A part of a step in one phase, in times of the CPU."""

    phase: Phase
    step: int
    start: float
    end: float


def _segments(trace: Trace, boundaries: Sequence[float]) -> list[Segment]:
    """Return the phases of the steps between boundaries, without gaps and in order."""
    marks = [
        (phase, mark) for mark in trace.marks for begin, phase in traces.PHASE_MARKS if mark.name.startswith(begin)
    ]
    marks.sort(key=lambda each: (each[1].start, -each[1].end))
    return [
        Segment(phase, step, low, high)
        for step, (start, end) in enumerate(pairwise(boundaries))
        for phase, low, high in _phases_between(marks, start, end)
    ]


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


def _device_clock(trace: Trace) -> Callable[[float], float]:
    """Return a function from a time of the CPU to that at which the device has finished what was launched before.

    A device runs behind the CPU that launches its kernels. On the CPU, and while a device is idle, both are the same.
    """
    kernels = sorted(trace.kernels, key=lambda kernel: kernel.launched)
    launched = [kernel.launched for kernel in kernels]
    ends = list(accumulate((kernel.end for kernel in kernels), max))

    def device_time(time: float) -> float:
        index = bisect_right(launched, time)
        return max(time, ends[index - 1]) if index else time

    return device_time


class _Collective(NamedTuple):
    """A collective in a trace.

    Attributes:
        called: when a CPU thread has called it.
        thread: this thread, if it is known.
        spans: the times in which it ran, or in which the thread called it or waited for it.
    """

    kind: CollectiveKind
    called: float
    thread: int | None
    spans: list[Interval]


_Activity = tuple[Sequence[Interval], Sequence[Interval], Sequence[_Collective]]
"""What a rank did: the times of its computation, those of its communication, and the collectives."""


def _device_activity(trace: Trace) -> _Activity:
    collectives = [
        _Collective(kind, kernel.launched, None, [(kernel.start, kernel.end)])
        for kernel in trace.kernels
        if (kind := kernel.nccl_kind) is not None
    ]
    compute = _spans(kernel for kernel in trace.kernels if kernel.nccl_kind is None and not kernel.copies)
    communication = [span for each in collectives for span in each.spans]
    return merge_intervals(compute), merge_intervals(communication), collectives


def _cpu_activity(trace: Trace) -> _Activity:
    """Read the calls with gloo: a wait belongs to the last call before it that nothing has waited for.

    A call that another one makes is a part of it.
    """
    collectives: list[_Collective] = []
    ends: dict[int, float] = {}
    for issue in trace.issues:
        if issue.end > ends.get(issue.thread, 0.0):
            ends[issue.thread] = issue.end
            kind = traces.collective_kind(issue.name)
            assert kind is not None, "an issue starts a collective"
            collectives.append(_Collective(kind, issue.start, issue.thread, [(issue.start, issue.end)]))
    waits = merge_intervals(_spans([*trace.waits, *(mark for mark in trace.marks if mark.name == traces.WAIT)]))
    num_called, pending = 0, []
    for wait in waits:
        while num_called < len(collectives) and collectives[num_called].called < wait[1]:
            pending.append(collectives[num_called])
            num_called += 1
        if pending:
            pending.pop().spans.append(wait)
    communication = merge_intervals([*waits, *(span for each in collectives for span in each.spans)])
    return subtract_intervals(merge_intervals(_spans(trace.ops)), communication), communication, collectives


def _unit_marks(marks: Iterable[Event], names: Iterable[str]) -> list[tuple[float, float, int | None, str]]:
    """Return the marks around the calls of the units' collectives, with the names of the units.

    FSDP2 joins the modules of a unit by commas.
    """
    known = {frozenset(name.split(" + ")): name for name in names}
    found: list[tuple[float, float, int | None, str]] = []
    for mark in marks:
        if (written := _written_unit(mark.name)) is not None:
            modules = [canonical_name(part) for part in written.split(", ")]
            name = known.get(frozenset(modules), " + ".join(modules))
            found.append((mark.start, mark.end, mark.thread, name))
    return found


def _written_unit(mark: str) -> str | None:
    for prefix in (traces.GATHER, traces.REDUCE):
        if mark.startswith(prefix):
            return mark.removeprefix(prefix)
    name, _, rest = mark.partition(" (")
    return rest.partition(")")[0] if name.strip() in traces.TORCH_UNIT_MARKS else None


def _spans(events: Iterable[Event]) -> list[Interval]:
    return [(event.start, event.end) for event in events]
