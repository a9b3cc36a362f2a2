"""Finds the ranks that have left collectives out, or made others, from the calls of classes of ranks that differ."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from hf_fsdp_plugin.hangs.calls import Call, GroupCalls

_MAX_SKIPPED: Final = 64
"""Calls that are searched for the one with which a rank goes on after it has skipped some."""


def find_skipped(
    number: int, classes: Sequence[tuple[GroupCalls, Sequence[int]]], *, by_history: bool = True
) -> tuple[tuple[int, ...], tuple[Call, ...]]:
    """Return which of two classes of ranks has left out calls that the other made, and these calls.

    Args:
        number: number of the first collective in which the classes differ.
        classes: the calls and the ranks of each class.
        by_history: whether earlier steps decide if the calls after the difference do not.

    Returns:
        The ranks and the calls; both empty if that is unknown.
    """
    if len(classes) != 2:
        return (), ()
    found = []
    for (most, _), (few, ranks) in (classes, classes[::-1]):
        if num := _num_skipped(most, few, number):
            calls = tuple(call for offset in range(num) if (call := most.call(number + offset)) is not None)
            found.append((tuple(ranks), calls))
    # If both left calls out, the orders differ. The shorter gap is the likelier one; in a tie nobody is named.
    found.sort(key=lambda each: len(each[1]))
    if not found or (len(found) == 2 and len(found[0][1]) == len(found[1][1])):
        return _skipped_by_history(number, classes) if by_history else ((), ())
    return found[0]


def find_unusual(number: int, classes: Sequence[tuple[GroupCalls, Sequence[int]]]) -> tuple[int, ...]:
    """Return the ranks whose call did not follow the call before in earlier steps, if that of one class did.

    Args:
        number, classes: see :func:`find_skipped`.
    """
    group = classes[0][0]
    past = [call.compared for each in range(group.last - len(group.calls) + 1, number) if (call := group.call(each))]
    follows = set(pairwise(past))
    usual = [past and (past[-1], call.compared) in follows for each, _ in classes if (call := each.call(number))]
    if usual.count(True) != 1 or len(usual) != len(classes):
        return ()
    return tuple(
        sorted(rank for is_usual, (_, ranks) in zip(usual, classes, strict=True) if not is_usual for rank in ranks)
    )


def _skipped_by_history(
    number: int, classes: Sequence[tuple[GroupCalls, Sequence[int]]]
) -> tuple[tuple[int, ...], tuple[Call, ...]]:
    """Return which class has left calls out, judged by the calls before, if a backend failed at the first difference.

    In earlier steps, the last common call was followed by the call of one class only, and later by that of the other.
    """
    group = classes[0][0]
    past = [call for each in range(group.last - len(group.calls) + 1, number) if (call := group.call(each)) is not None]
    compared = [call.compared for call in past]
    follows = set(pairwise(compared))
    found = []
    for (usual, _), (odd, ranks) in (classes, classes[::-1]):
        after, other = usual.call(number), odd.call(number)
        if not past or after is None or other is None or (compared[-1], other.compared) in follows:
            continue
        for at in range(len(past) - 1, 0, -1):
            if (compared[at - 1], compared[at]) == (compared[-1], after.compared):
                if other.compared in (rest := compared[at : at + _MAX_SKIPPED]):
                    found.append((tuple(ranks), tuple(past[at : at + rest.index(other.compared)])))
                break
    return found[0] if len(found) == 1 else ((), ())


def _num_skipped(other: GroupCalls, own: GroupCalls, number: int) -> int:
    """Return how many calls of ``other`` were skipped, so that the next ones equal those of ``own``; 0 if none fit."""
    num_own = own.last - number + 1
    for num in range(1, _MAX_SKIPPED):
        overlap = min(num_own, other.last - (number + num) + 1, _MAX_SKIPPED)
        if overlap < 1:
            return 0
        if all(
            (a := other.call(number + num + offset)) is not None
            and (b := own.call(number + offset)) is not None
            and a.compared == b.compared
            for offset in range(overlap)
        ):
            return num
    return 0
