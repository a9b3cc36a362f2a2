"""The streams of one step, simulated: computation, all-gathers and reduce-scatters, all-reduces. Sets of intervals."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.tools.plan.estimate.types import Workload

if TYPE_CHECKING:  # profiles are read without torch
    from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan

Interval = tuple[float, float]
"""Start and end in seconds. A sorted list of intervals that do not touch is a set. Functions of sets are linear."""
Stream = Literal["compute", "communication", "all_reduce", "axes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTimes:
    """Seconds of one unit in one micro-batch.

    Attributes:
        gather_forward, gather_backward: all-gathers; 0 if the unit stays gathered.
        reduce, all_reduce: reduction over the shard axis and over the replicas.
        exchange_forward, exchange_backward: collectives over context, tensor and expert axes, for which layers wait.
    """

    name: str
    forward: float
    backward: float
    gather_forward: float = 0.0
    gather_backward: float = 0.0
    reduce: float = 0.0
    all_reduce: float = 0.0
    exchange_forward: float = 0.0
    exchange_backward: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """An interval of a stream, in seconds since the step began."""

    stream: Stream
    what: str
    start: float
    end: float


@dataclass(slots=True)
class Timeline:
    """The spans of a step, and the time up to which each stream is occupied.

    Attributes:
        overlaps: whether streams run at the same time; if not, every collective blocks the computation.
    """

    overlaps: bool
    spans: list[Span] = field(default_factory=list)
    free: dict[Stream, float] = field(default_factory=lambda: dict.fromkeys(get_args(Stream), 0.0))

    def run(self, stream: Stream, what: str, seconds: float, after: float = 0.0) -> float:
        """Append a span that begins when the stream is free and not before ``after``. Return its end."""
        start = max(self.free[stream], after)
        if seconds > 0:
            self.spans.append(Span(stream=stream, what=what, start=start, end=start + seconds))
            self.free[stream] = start + seconds
        return start + seconds

    def wait_for_all(self) -> float:
        end = max(self.free.values())
        self.free = dict.fromkeys(self.free, end)
        return end

    def forward(self, units: Sequence[UnitTimes], *, gathers: bool, limited: bool) -> None:
        """Run a forward. Each all-gather waits for the start of the preceding unit if they are limited."""
        start = self.free["compute"]
        for unit in units:
            issued = start if self.overlaps else self.free["compute"]
            ready = self._gather(unit.name, unit.gather_forward if gathers else 0.0, issued)
            end = self.run("compute", f"forward of {unit.name}", unit.forward, ready)
            self._exchange(unit.name, unit.exchange_forward, end)
            start = end - unit.forward if limited else start

    def backward(self, units: Sequence[UnitTimes], *, reduces: bool, all_reduces: bool, prefetch: str) -> None:
        """Run a backward, the last unit first."""
        ready: float | None = None
        order = list(reversed(units))
        for unit, preceding in zip(order, [*order[1:], None], strict=False):
            if ready is None:
                ready = self._gather(unit.name, unit.gather_backward, self.free["compute"])
            computed = self.run("compute", f"backward of {unit.name}", unit.backward, ready)
            end = self._exchange(unit.name, unit.exchange_backward, computed)
            ready = None
            if self.overlaps and prefetch != "none" and preceding is not None:
                issued = computed - unit.backward if prefetch == "pre" else end
                ready = self._gather(preceding.name, preceding.gather_backward, issued)
            if reduces and unit.reduce:
                end = self.run("communication", f"reduce-scatter of {unit.name}", unit.reduce, end)
            if all_reduces and unit.all_reduce:
                end = self.run("all_reduce", f"all-reduce of {unit.name}", unit.all_reduce, end)
            if reduces and not self.overlaps:
                self.free["compute"] = max(self.free["compute"], end)

    def _exchange(self, name: str, seconds: float, after: float) -> float:
        """Run the collectives of a unit's layers, for which the computation waits. Return their end."""
        if seconds:
            self.free["compute"] = after = self.run("axes", f"exchange of {name}", seconds, after)
        return after

    def _gather(self, name: str, seconds: float, issued: float) -> float:
        """Run an all-gather. Return its end; 0 if there is none."""
        return self.run("communication", f"all-gather of {name}", seconds, issued) if seconds else 0.0


def simulate(
    units: Sequence[UnitTimes], plan: FsdpPlan, workload: Workload, *, overlaps: bool, tail: float
) -> Timeline:
    """Return the timeline of one step.

    An all-gather of the next unit starts with a unit's forward: torch issues it ahead of the device, and FSDP2 and
    ``limit_all_gathers`` keep two units gathered. In backward it starts before the gradients of the unit (``pre``),
    after them (``post``) or when the next unit begins (``none``). Reduce-scatters follow the unit's backward, in the
    order in which they are issued.

    Args:
        units: the times of the units, in forward order.
        overlaps: see :class:`Timeline`.
        tail: seconds of clipping and update.
    """
    timeline = Timeline(overlaps)
    # Units of FSDP1 that are not freed after forward stay gathered in later micro-batches.
    keeps_gathered = plan.backend == "fsdp1" and not STRATEGIES[plan.strategy].reshards_after_forward
    for index in range(workload.accumulation):
        gathers = index == 0 or workload.sync_each_batch or not keeps_gathered
        timeline.forward(units, gathers=gathers, limited=plan.prefetch.limit_all_gathers)
        all_reduces = workload.sync_each_batch or index == workload.accumulation - 1
        reduces = all_reduces or plan.spec.sharding.reduce_replicas_at_last_micro_batch
        timeline.backward(units, reduces=reduces, all_reduces=all_reduces, prefetch=plan.prefetch.backward)
        if reduces:
            timeline.wait_for_all()
    timeline.run("compute", "update", tail, timeline.wait_for_all())
    return timeline


def exposed_seconds(timeline: Timeline) -> float:
    """Return the seconds of communication during which nothing is computed."""
    compute = merge_intervals((span.start, span.end) for span in timeline.spans if span.stream == "compute")
    communication = merge_intervals((span.start, span.end) for span in timeline.spans if span.stream != "compute")
    return total_length(subtract_intervals(communication, compute))


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals as a set: sorted, and merged where they overlap or touch. Empty ones are dropped."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def total_length(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths. For a set, that is the time which it covers."""
    return sum(end - start for start, end in intervals)


def clip_intervals(intervals: Sequence[Interval], start: float, end: float) -> list[Interval]:
    """Return the part of a set between two times, without reading the rest of the set."""
    first = max(0, bisect_right(intervals, (start, float("inf"))) - 1)
    last = bisect_left(intervals, (end, float("-inf")))
    found = ((max(low, start), min(high, end)) for low, high in intervals[first:last])
    return [(low, high) for low, high in found if high > low]


def subtract_intervals(intervals: Sequence[Interval], removed: Sequence[Interval]) -> list[Interval]:
    """Return the part of a set that is not in another set."""
    rest: list[Interval] = []
    for start, end in intervals:
        for low, high in clip_intervals(removed, start, end):
            if low > start:
                rest.append((start, low))
            start = high
        if start < end:
            rest.append((start, end))
    return rest
