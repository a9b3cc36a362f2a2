"""Sets of intervals of time, as sorted lists of ``(start, end)`` that do not touch. All functions take linear time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
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


def measure(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths. For a set, that is the time which it covers."""
    return sum(end - start for start, end in intervals)


def clip(intervals: Sequence[Interval], start: float, end: float) -> list[Interval]:
    """Return the part of a set between two times, without reading the rest of the set."""
    first = max(0, bisect_right(intervals, (start, float("inf"))) - 1)
    last = bisect_left(intervals, (end, float("-inf")))
    found = ((max(low, start), min(high, end)) for low, high in intervals[first:last])
    return [(low, high) for low, high in found if high > low]


def subtract(intervals: Sequence[Interval], removed: Sequence[Interval]) -> list[Interval]:
    """Return the part of a set that is not in another set."""
    rest: list[Interval] = []
    at = 0
    for start, end in intervals:
        while at < len(removed) and removed[at][1] <= start:
            at += 1
        index, position = at, start
        while index < len(removed) and removed[index][0] < end:
            if removed[index][0] > position:
                rest.append((position, removed[index][0]))
            position = max(position, removed[index][1])
            index += 1
        if position < end:
            rest.append((position, end))
    return rest


def intersect(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the part of a set that is also in another set."""
    return subtract(intervals, subtract(intervals, others))
