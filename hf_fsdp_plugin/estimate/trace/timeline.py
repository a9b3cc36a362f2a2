"""Compute moments of a step from recorded allocations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from hf_fsdp_plugin.estimate.results import MEMORY_KINDS, MemoryKind, Moment
from hf_fsdp_plugin.estimate.trace.device import Device
from hf_fsdp_plugin.estimate.trace.recorder import Event


class _Held:
    """Bytes that are held: on the device by kind, and on the host."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.by_kind: dict[MemoryKind, int] = dict.fromkeys(MEMORY_KINDS, 0)
        self.by_kind["other"] = device.framework_bytes
        self.total, self.host = device.framework_bytes, 0

    def apply(self, event: Event) -> None:
        size = event.sign * self._device.size_of(event.block)
        kind = self._device.kind_of(event.block)
        if kind is None:
            self.host += size
        else:
            self.by_kind[kind] += size
            self.total += size


def moments(events: Sequence[Event], start: int, device: Device) -> tuple[list[Moment], int]:
    """Return the moment with the most memory of each part of a step, in order, and the peak of host memory.

    Args:
        events: all events since the first allocation.
        start: index of the first event of the step.
    """
    held = _Held(device)
    for event in events[:start]:
        held.apply(event)
    found, host = [], held.host
    for where, group in groupby(events[start:], key=lambda event: event.where):
        largest, total = dict(held.by_kind), -1
        for event in group:
            held.apply(event)
            host = max(host, held.host)
            if event.sign > 0 and held.total > total:
                largest, total = dict(held.by_kind), held.total
        found.append(Moment(where=where, bytes_by_kind=largest))
    return found, host


def merged(found: Iterable[Moment], is_root: Callable[[str], bool]) -> tuple[Moment, ...]:
    """Return the moments without those of the root between two units: of each of its parts, the largest is kept."""
    largest: dict[str, Moment] = {}
    listed = list(found)
    for moment in listed:
        known = largest.get(moment.where)
        largest[moment.where] = moment if known is None or moment.bytes > known.bytes else known
    kept: list[Moment] = []
    for moment in listed:
        if is_root(moment.where) and moment is not largest[moment.where]:
            continue
        if kept and kept[-1].where == moment.where:
            kept[-1] = max(kept[-1], moment, key=lambda one: one.bytes)
        else:
            kept.append(moment)
    return tuple(kept)
