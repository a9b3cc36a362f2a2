"""Memory by kind over one step: what was allocated, joined with what was read off the units at some moments."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from hf_fsdp_plugin.estimate.results import MemoryKind, Moment
from hf_fsdp_plugin.observe.profile.calls import UnitMarks
from hf_fsdp_plugin.observe.profile.marks import SAMPLE
from hf_fsdp_plugin.observe.profile.phases import read_boundaries, read_steps
from hf_fsdp_plugin.observe.profile.trace import MemoryPoint, Trace


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
