"""The profile of one rank: the phases of its steps, its computation and its collectives, read from its trace.

The trace is the Chrome trace that torch's profiler writes. Its fields are those of Kineto (``output_json.cpp``). The
first part of this file contains the names of the marks that a profiled rank writes into it, and of torch's own marks.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self, TypeVar, get_args

from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.tools.plan.estimate.schedule import (
    Interval,
    clip_intervals,
    merge_intervals,
    subtract_intervals,
    total_length,
)
from hf_fsdp_plugin.tools.plan.estimate.types import CollectiveKind

T = TypeVar("T")
Phase = Literal["forward", "backward", "clipping", "optimizer", "data", "checkpoint", "evaluation", "other"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
"""Parts of a step. ``forward`` includes the computation of the loss; ``data`` is the time in the data loader on the
main thread; ``other`` is what no mark covers.
"""

PREFIX: Final = "hf_fsdp::"
BOUNDARY: Final = f"{PREFIX}step"
"""Mark of an instant: the end of an optimizer step."""
WAIT: Final = f"{PREFIX}wait"
"""Mark of the time in which the main thread waits for a collective."""
UNIT: Final = f"{PREFIX}unit "
"""Beginning of the mark of a unit's forward, also of a recomputed one. The name of the unit follows."""
GATHER: Final = f"{PREFIX}gather "
REDUCE: Final = f"{PREFIX}reduce "
"""Prefixes of the marks of an FSDP1 unit's collectives. The unit's name follows, which FSDP1 writes to no trace."""
PHASE_MARKS: Final[tuple[tuple[str, Phase], ...]] = (
    *((f"{PREFIX}{phase}", phase) for phase in PHASES),
    ("Optimizer.step#", "optimizer"),
    ("Optimizer.zero_grad#", "optimizer"),
    ("enumerate(DataLoader)#", "data"),
)
"""Prefix of a mark's name -> phase: the marks of this package, and those that torch writes itself
(``torch/optim/optimizer.py``, ``torch/utils/data/dataloader.py``).
"""
TORCH_UNIT_MARKS: Final = ("FSDP::all_gather", "FSDP::post_backward_reduce")
"""Marks of FSDP2 around the calls of a unit's collectives, followed by `` (name)`` unless it is the root
(``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``).
"""

_KINDS: Final[tuple[CollectiveKind, ...]] = get_args(CollectiveKind)
"""Parts of names, without the underscores: of the operations that start a collective, such as
``c10d::_allgather_base_`` (``torch/csrc/distributed/c10d/Ops.cpp``), and of the kernels of NCCL and RCCL, such as
``ncclDevKernel_AllGather_RING_LL``.
"""
_NOT_COMPUTATION: Final = ("c10d::", "_c10d_functional::", "autograd::", PREFIX)
_KERNELS: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES: Final = ("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime")


@dataclass(frozen=True, slots=True)
class Event:
    """An operation or an annotation of a CPU thread, or a kernel of a device, in seconds since the epoch.

    Attributes:
        launched: when a CPU thread launched a kernel; its start if that is unknown.
    """

    name: str
    start: float
    end: float
    thread: int = 0
    launched: float = 0.0

    @property
    def nccl_kind(self) -> CollectiveKind | None:
        """The kind of collective that a kernel of NCCL or RCCL executes; ``None`` for other kernels."""
        return collective_kind(self.name) or "broadcast" if self.name.startswith(("nccl", "rccl")) else None

    @property
    def copies(self) -> bool:
        """Whether a kernel copies between host and device."""
        return self.name.startswith(("Memcpy HtoD", "Memcpy DtoH"))


def collective_kind(name: str) -> CollectiveKind | None:
    """Return the kind in the name of an operation or a kernel; ``None`` if the name contains none."""
    plain = name.replace("_", "").lower()
    return next((kind for kind in _KINDS if kind.replace("_", "") in plain), None)


@dataclass(kw_only=True)
class Trace:
    """What the analysis needs of one rank's trace. Every list is sorted by start.

    Attributes:
        marks: annotations of CPU threads.
        ops: operations of CPU threads that compute.
        waits: operations in which a CPU thread waits for a collective, other than issues.
        issues: operations with which a CPU thread starts a collective.
        kernels: kernels and copies of a device.
    """

    marks: list[Event] = field(default_factory=list)
    ops: list[Event] = field(default_factory=list)
    waits: list[Event] = field(default_factory=list)
    issues: list[Event] = field(default_factory=list)
    kernels: list[Event] = field(default_factory=list)

    def list_of(self, category: str, name: str) -> list[Event] | None:
        """Return the list to which an event belongs; ``None`` if the analysis does not need it."""
        if category == "user_annotation":
            return self.marks
        if category in _KERNELS:
            return self.kernels
        if name.startswith("c10d::") and collective_kind(name) is not None:
            return self.issues
        if name == "_c10d_functional::wait_tensor":
            return self.waits
        return self.ops if "::" in name and not name.startswith(_NOT_COMPUTATION) else None


def read_trace(path: Path) -> Trace:
    """Return the content of a Chrome trace.

    Raises:
        ValueError: it is not a complete trace of torch's profiler.
        OSError: it cannot be read.
    """
    rows: list[tuple[float, float, str, str, int, int]] = []
    launches: dict[int, float] = {}

    def reduce_object(pairs: list[tuple[str, Any]]) -> Any:
        """Keep only the needed fields of an event while the file is parsed: a trace can have millions of events."""
        tree = dict(pairs)
        if "ph" not in tree:
            return tree  # the arguments of an event, or the whole trace
        category, start, args = str(tree.get("cat", "")), float(tree.get("ts", 0)), tree.get("args", {})
        correlation = int(args.get("correlation", -1))
        if category in _LAUNCHES:
            launches[correlation] = start
        elif tree["ph"] == "X" and category in ("cpu_op", "user_annotation", *_KERNELS):
            thread = tree.get("tid", 0)
            thread = thread if isinstance(thread, int) else 0
            end = start + float(tree.get("dur", 0))
            rows.append((start, end, category, str(tree["name"]), thread, correlation))
        return None

    with path.open() as file:
        tree = json.load(file, object_pairs_hook=reduce_object)
    if not isinstance(tree, dict) or "traceEvents" not in tree:
        raise ValueError(f"{path} has no traceEvents.")
    base = float(tree.get("baseTimeNanoseconds", 0)) / 1e9
    trace = Trace()
    for start, end, category, name, thread, correlation in sorted(rows):
        if (events := trace.list_of(category, name)) is not None:
            launched = base + launches.get(correlation, start) / 1e6
            events.append(Event(name, base + start / 1e6, base + end / 1e6, thread, launched))
    return trace


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

    def to_json(self) -> dict[str, float]:
        """Return ``phase_times`` of docs/json.schema.json."""
        whole = self.compute + self.communication
        return {
            "seconds": self.seconds,
            **{f"{name}_seconds": getattr(self, name) for name in ("compute", "communication", "exposed", "idle")},
            "communication_share": self.communication / whole if whole else 0.0,
        }


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
        facts: values that the trace does not contain: the model, and sizes and ranks of units.
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
    ends = [mark.end for mark in trace.marks if mark.name == BOUNDARY]
    if len(ends) < 2:
        return RankProfile(**more)
    skip = min(skip, len(ends) - 2)
    segments = list(_segments(trace, ends[skip : skip + most + 1]))
    num_steps = segments[-1].step + 1
    phase_spans = [(segment.start, segment.end, None, segment) for segment in segments]
    unit_spans = _unit_marks(trace.marks, unit_names)
    compute, communication, collectives = (_device_activity if trace.kernels else _cpu_activity)(trace)
    exposed = subtract_intervals(communication, compute)
    device_time = _device_clock(trace)

    def times_between(start: float, end: float) -> Times:
        start, end = device_time(start), device_time(end)
        sets = compute, communication, exposed
        computed, called, waited = (total_length(clip_intervals(each, start, end)) for each in sets)
        return Times(seconds=end - start, compute=computed, communication=called, exposed=waited)

    times: dict[Phase, Times] = defaultdict(Times)
    for segment in segments:
        times[segment.phase] += times_between(segment.start, segment.end)
    units: dict[str, list[float]] = {}
    for mark in trace.marks:
        inside = _innermost(phase_spans, mark.start) if mark.name.startswith(UNIT) else None
        if inside is not None and inside.phase in ("forward", "backward"):
            found = times_between(mark.start, mark.end)
            seconds = found.compute if trace.kernels else found.seconds - found.exposed
            of_unit = units.setdefault(mark.name.removeprefix(UNIT), [0.0, 0.0])
            of_unit[inside.phase == "backward"] += seconds / num_steps
    calls = []
    for each in collectives:
        if (inside := _innermost(phase_spans, each.called)) is not None:
            spans = merge_intervals(each.spans)
            seconds = total_length(spans)
            hidden = sum(total_length(clip_intervals(compute, *span)) for span in spans)
            context = _innermost(unit_spans, each.called, each.thread), inside.step, inside.phase
            calls.append(TimedCollective(each.kind, *context, spans[0][0], spans[-1][1], seconds, seconds - hidden))
    return RankProfile(
        num_steps=num_steps,
        times={phase: each.scaled(1 / num_steps) for phase, each in times.items()},
        calls=calls,
        units={name: UnitSeconds(*seconds) for name, seconds in units.items()},
        **more,
    )


def _innermost(spans: Sequence[tuple[float, float, int | None, T]], time: float, thread: int | None = None) -> T | None:
    """Return the value of the innermost span that contains a time, of a thread if one is given.

    Args:
        spans: start, end, thread and value, sorted by start.
    """
    last = bisect_right(spans, time, key=lambda span: span[0])
    around = reversed(spans[max(0, last - 4) : last])
    return next((value for _, end, own, value in around if time < end and thread in (None, own)), None)


class Segment(NamedTuple):
    """A part of a step in one phase, in times of the CPU."""

    phase: Phase
    step: int
    start: float
    end: float


def _segments(trace: Trace, boundaries: Sequence[float]) -> Iterator[Segment]:
    """Yield the phases of the steps between boundaries, in order.

    The time between the outermost marks is filled: between a forward and its backward, the loss is computed.
    """
    marks = [(phase, mark) for mark in trace.marks for begin, phase in PHASE_MARKS if mark.name.startswith(begin)]
    marks.sort(key=lambda each: (each[1].start, -each[1].end))
    for step, (start, end) in enumerate(pairwise(boundaries)):
        position, last = start, ""
        for phase, mark in marks:
            low, high = max(mark.start, position), min(mark.end, end)
            if high <= low:
                continue  # in another step, or inside of another mark
            if low > position:
                is_loss = (last, phase) == ("forward", "backward")
                yield Segment("forward" if is_loss else "other", step, position, low)
            yield Segment(phase, step, low, high)
            position, last = high, phase
        if end > position:
            yield Segment("other", step, position, end)


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
            kind = collective_kind(issue.name)
            assert kind is not None, "an issue starts a collective"
            collectives.append(_Collective(kind, issue.start, issue.thread, [(issue.start, issue.end)]))
    waits = merge_intervals(_spans([*trace.waits, *(mark for mark in trace.marks if mark.name == WAIT)]))
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
        kind, _, rest = mark.name.partition(" (")
        if mark.name.startswith((GATHER, REDUCE)):
            written = mark.name.removeprefix(GATHER).removeprefix(REDUCE)
        elif kind.strip() in TORCH_UNIT_MARKS:
            written = rest.partition(")")[0]
        else:
            continue
        modules = [canonical_name(part) for part in written.split(", ")]
        name = known.get(frozenset(modules), " + ".join(modules))
        found.append((mark.start, mark.end, mark.thread, name))
    return found


def _spans(events: Iterable[Event]) -> list[Interval]:
    return [(event.start, event.end) for event in events]
