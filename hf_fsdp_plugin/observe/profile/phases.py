"""Divides the steps of a rank into phases. Every moment of a step belongs to exactly one phase."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hf_fsdp_plugin.observe.profile.marks import BOUNDARY, PHASE_MARKS, TORCH_PHASE_MARKS, Phase
from hf_fsdp_plugin.observe.profile.trace import Event, Trace


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
    outer = _outermost(marks, start, end)
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


def _outermost(marks: Sequence[tuple[Phase, Event]], start: float, end: float) -> list[Segment]:
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
