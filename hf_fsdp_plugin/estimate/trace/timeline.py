"""Compute moments of a step from recorded allocations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from hf_fsdp_plugin.estimate.results import MEMORY_KINDS, MemoryKind, Moment
from hf_fsdp_plugin.estimate.trace.recorder import Block, Event

_OF_LABEL: dict[str | None, MemoryKind] = {
    "params": "params", "grads": "grads", "optimizer": "optimizer", "buffers": "other", "gathered": "gathered",
}  # fmt: skip


def kind_of(block: Block) -> MemoryKind:
    """Return the kind of a block: by its label, or by where it was allocated."""
    if block.label is not None:
        return _OF_LABEL[block.label]
    return "activations" if block.where.startswith(("forward", "backward")) else "other"


def moments(events: Sequence[Event], start: int, size_of: Callable[[int], int] = int) -> list[Moment]:
    """Return the moment with the most memory of each part of a step, in order.

    Args:
        events: all events since the first allocation.
        start: index of the first event of the step.
        size_of: returns the bytes that the allocator takes for a number of bytes.
    """
    held = dict.fromkeys(MEMORY_KINDS, 0)
    for event in events[:start]:
        held[kind_of(event.block)] += event.sign * size_of(event.block.size)
    found = []
    for where, group in groupby(events[start:], key=lambda event: event.where):
        largest, total = dict(held), -1
        for event in group:
            held[kind_of(event.block)] += event.sign * size_of(event.block.size)
            if event.sign > 0 and sum(held.values()) > total:
                largest, total = dict(held), sum(held.values())
        found.append(Moment(where=where, bytes_by_kind=largest))
    return found


def merged(found: Iterable[Moment], is_between: Callable[[str], bool]) -> tuple[Moment, ...]:
    """Return the moments without those between two units, unless they need more memory than both neighbors."""
    listed = list(found)
    kept: list[Moment] = []
    for index, moment in enumerate(listed):
        around = listed[max(index - 1, 0) : index] + listed[index + 1 : index + 2]
        if is_between(moment.where) and around and moment.bytes <= max(other.bytes for other in around):
            continue
        if kept and kept[-1].where == moment.where:
            kept[-1] = max(kept[-1], moment, key=lambda one: one.bytes)
        else:
            kept.append(moment)
    return tuple(kept)
