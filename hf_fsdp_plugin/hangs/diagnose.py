"""Finds why ranks wait in a collective: a pure function of what is known of each rank. Linear in the number of ranks.

A collective has a number in its process group. The ranks of the group that have not begun it are late. If a late rank
itself waits in another collective, the ranks late for that one are the cause, and so on; a circle means that ranks
wait for each other in different calls. If nobody is late, or the late rank made other calls before, the first call in
which the records of the ranks differ is the cause: gathers of equally large layers are mixed without an error when a
rank skips one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from hf_fsdp_plugin.hangs.calls import POINT_TO_POINT, Call, GroupCalls, RankCalls, Wait, unpack_ranks

HangKind = Literal["late", "different", "circle", "stuck"]
_BUSY_SHARE: Final = 0.03
"""Share of one core from which on a late rank is busy. Threads of idle processes use less than 1%."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A collective that ranks wait in.

    Attributes:
        group: its process group.
        number: its number in the group.
        ranks: the ranks that wait in it.
        seconds: the longest wait.
    """

    group: str
    number: int
    call: Call
    ranks: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Difference:
    """The first collective of a process group in which ranks differ.

    Attributes:
        group: the process group.
        number: the number of the collective in the group.
        calls: what ranks called, the call of most ranks first.
        skipped: the ranks that have left calls out, which are the reason, and these calls; empty if that is unknown.
        unusual: the ranks whose call did not follow the one before in earlier steps, if that of all others did.
        more_forwards: the ranks that have called the model more often than all others after the same number of
            optimizer steps, and how often these and the others have; for calls of units only.
    """

    group: str
    number: int
    calls: tuple[tuple[Call, tuple[int, ...]], ...]
    skipped: tuple[tuple[int, ...], tuple[Call, ...]] = ((), ())
    unusual: tuple[int, ...] = ()
    more_forwards: tuple[tuple[int, ...], int, int] = ((), 0, 0)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that skipped calls, if that is known, or else differ from most others.

        In a tie: those that have made an unusual call, or have called the model more often; or all.
        """
        if self.skipped[0]:
            return self.skipped[0]
        is_tie = len(self.calls[0][1]) == len(self.calls[1][1])
        if is_tie and (known := self.unusual or self.more_forwards[0]):
            return known
        return tuple(sorted(rank for _, ranks in self.calls[0 if is_tie else 1 :] for rank in ranks))


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Why ranks wait.

    Attributes:
        kind: ``late``: ranks have not begun the collective and wait in none; ``different``: ranks called different
            collectives; ``circle``: ranks wait for each other in different calls; ``stuck``: all ranks have begun the
            same collective, and it does not end.
        ranks: the ranks that cause it; all that wait for each other in a circle; empty if nobody is late.
        waiting: the collective that has been waited for the longest.
        others: further collectives in which ranks wait.
        difference: the first difference; ``None`` without one.
        is_busy: whether each late rank makes progress, so that it may still come.
        reads: whether each late rank is busy, or waits for a file system or a data loader.
    """

    kind: HangKind
    ranks: tuple[int, ...]
    waiting: Waiting
    others: tuple[Waiting, ...] = ()
    difference: Difference | None = None
    is_busy: bool = False
    reads: bool = False


def diagnose_hang(ranks: Iterable[RankCalls], *, limit: float) -> Diagnosis | None:
    """Return why ranks have waited for ``limit`` seconds; ``None`` if none has.

    Args:
        limit: seconds that at least one rank must have waited. If no rank is in one, as
            on accelerators, whose collectives are only enqueued, a rank waits if it has been idle for that time and
            has begun collectives that another rank of the group has not begun.
    """
    known = {rank.rank: rank for rank in ranks}
    members = _members(known)
    waits = {number: rank.wait for number, rank in known.items() if rank.wait is not None and _runs(rank)}
    waits = {number: wait for number, wait in waits.items() if wait.seconds >= min(1.0, limit / 2)}
    waits = waits or _enqueued_waits(known, members, limit)
    if max((wait.seconds for wait in waits.values()), default=0.0) < limit:
        return None
    waiting = _grouped(waits)
    longest = waiting[0]
    difference = _first_difference(known, members, longest.group)
    late = _late(longest, known, members)
    causes, circle = _follow(late, waits, known, members)
    facts: dict[str, Any] = {"waiting": longest, "others": tuple(waiting[1:]), "difference": difference}
    # A process that was stopped after it had begun the collective is not late, but the collective cannot end.
    gone = {rank for rank in members.get(longest.group, ()) if known[rank].state in ("halted", "exited", "unreachable")}
    if gone := gone.union(rank for rank in causes if not _runs(known[rank])):
        return Diagnosis(kind="late", ranks=tuple(sorted(gone)), **facts)
    if difference is not None:
        return Diagnosis(kind="different", ranks=difference.ranks, **facts)
    if causes:
        is_busy = all(_is_busy(known[rank]) for rank in causes)
        reads = all(known[rank].reads or _is_busy(known[rank]) for rank in causes)
        return Diagnosis(kind="late", ranks=causes, is_busy=is_busy, reads=reads, **facts)
    if circle:
        return Diagnosis(kind="circle", ranks=tuple(sorted({*circle, *longest.ranks})), **facts)
    return Diagnosis(kind="stuck", ranks=(), **facts)


def compare_calls(ranks: Iterable[RankCalls]) -> Difference | Waiting | None:
    """Return in what the records of ranks differ after a failure of the communication.

    Returns:
        The first difference; or else the first collective that some ranks had begun and others had not; or ``None``.
    """
    known = {rank.rank: rank for rank in ranks}
    members = _members(known)
    if (difference := _first_difference(known, members)) is not None:
        return difference
    for name, group_ranks in members.items():
        lasts = {rank: _last(known[rank], name) for rank in group_ranks}
        ahead = tuple(rank for rank, last in lasts.items() if last > min(lasts.values()))
        if ahead and name != POINT_TO_POINT:
            number = min(lasts.values()) + 1
            call = known[ahead[0]].groups[name].call(number)
            if call is not None:
                return Waiting(name, number, call, ahead, 0.0)
    return None


def _first_difference(
    known: Mapping[int, RankCalls], members: Mapping[str, Sequence[int]], first: str = ""
) -> Difference | None:
    """Return a difference in a group, that of the group ``first`` before others."""
    names = [first, *members] if first else list(members)
    found = (find_difference(name, known, members.get(name, ())) for name in names)
    return next((each for each in found if each is not None), None)


def find_difference(name: str, known: Mapping[int, RankCalls], members: Sequence[int]) -> Difference | None:
    """Return the first recorded collective of a group in which its ranks differ; ``None`` without one."""
    if name == POINT_TO_POINT:
        return None
    # Most ranks have made the same calls, so that one of each kind is compared.
    kinds: dict[GroupCalls, list[int]] = {}
    for rank in members:
        if name in known[rank].groups:
            kinds.setdefault(known[rank].groups[name], []).append(rank)
    first = max((group.last - len(group.calls) + 1 for group in kinds), default=0)
    last = min((group.last for group in kinds), default=-1)
    for number in range(first, last + 1 if len(kinds) > 1 else first):
        found: dict[tuple[Any, ...], list[GroupCalls]] = {}
        for group in kinds:
            if (call := group.call(number)) is not None:
                found.setdefault(call.compared, []).append(group)
        if len(found) > 1:
            classes = [
                (groups[0], sorted(rank for group in groups for rank in kinds[group])) for groups in found.values()
            ]
            classes.sort(key=lambda each: (-len(each[1]), each[1][0]))
            shown = tuple((call, tuple(ranks)) for group, ranks in classes if (call := group.call(number)) is not None)
            # Without a unit, a rank may be ahead in the model because the others make a call outside of it.
            in_model = all(call.unit for call, _ in shown)
            forwards = _more_forwards([known[rank] for _, ranks in classes for rank in ranks] if in_model else ())
            skipped = find_skipped(number, classes, by_history=not forwards[0])
            return Difference(name, number, shown, skipped, find_unusual(number, classes), forwards)
    return None


def _more_forwards(ranks: Sequence[RankCalls]) -> tuple[tuple[int, ...], int, int]:
    """Return the ranks that have called the model more often than the others, which a rank that evaluates alone has."""
    counts = {rank.forwards for rank in ranks}
    if len({rank.steps for rank in ranks}) > 1 or None in counts or len(counts) != 2:
        return (), 0, 0
    few, most = sorted(count for count in counts if count is not None)
    return tuple(sorted(rank.rank for rank in ranks if rank.forwards == most)), most, few


def _members(known: Mapping[int, RankCalls]) -> dict[str, list[int]]:
    """Return the ranks of each process group, also those that have not recorded anything of it."""
    packed = {name: group.ranks for rank in known.values() for name, group in rank.groups.items()}
    everyone = sorted(known)
    return {
        name: [rank for rank in unpack_ranks(ranks) if rank in known] if ranks else everyone
        for name, ranks in packed.items()
    }


def _grouped(waits: Mapping[int, Wait]) -> list[Waiting]:
    """Return the collectives in which ranks wait, the one that has been waited for the longest first."""
    ranks: dict[tuple[str, int, Call], list[int]] = {}
    seconds: dict[tuple[str, int, Call], float] = {}
    for rank, wait in waits.items():
        key = (wait.group, wait.number, wait.call)
        ranks.setdefault(key, []).append(rank)
        seconds[key] = max(seconds.get(key, 0.0), wait.seconds)
    found = [Waiting(*key, tuple(sorted(ranks[key])), seconds[key]) for key in ranks]
    return sorted(found, key=lambda each: (-each.seconds, each.group, each.number))


def _late(waiting: Waiting, known: Mapping[int, RankCalls], members: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks that have not begun a collective."""
    if waiting.group == POINT_TO_POINT:
        peer = waiting.call.peer
        return (peer,) if peer is not None and peer in known else ()
    return tuple(rank for rank in members[waiting.group] if _last(known[rank], waiting.group) < waiting.number)


def _last(rank: RankCalls, group: str) -> int:
    return rank.groups[group].last if group in rank.groups else 0


def _follow(
    late: Sequence[int], waits: Mapping[int, Wait], known: Mapping[int, RankCalls], members: Mapping[str, Sequence[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the late ranks that wait in no collective, and all that wait if there are none.

    Each collective is followed once.
    """
    causes: set[int] = set()
    circle: set[int] = set()
    seen: set[tuple[str, int]] = set()
    rest = list(late)
    while rest:
        rank = rest.pop()
        wait = waits.get(rank)
        if wait is None:
            causes.add(rank)
            continue
        circle.add(rank)
        if (wait.group, wait.number) not in seen:
            seen.add((wait.group, wait.number))
            rest += _late(Waiting(wait.group, wait.number, wait.call, (rank,), wait.seconds), known, members)
    return tuple(sorted(causes)), () if causes else tuple(sorted(circle))


def _enqueued_waits(
    known: Mapping[int, RankCalls], members: Mapping[str, Sequence[int]], limit: float
) -> dict[int, Wait]:
    """Return the ranks that have enqueued collectives for which others are late, if no rank has moved for the limit."""
    waits: dict[int, Wait] = {}
    enqueued = {name for rank in known.values() for name, group in rank.groups.items() if group.enqueues}
    for name, ranks in members.items():
        if name not in enqueued:
            continue
        lasts = {rank: _last(known[rank], name) for rank in ranks}
        lowest = min(lasts.values(), default=0)
        for rank, last in lasts.items():
            if last > lowest and known[rank].idle >= limit and _runs(known[rank]):
                call = known[rank].groups[name].call(lowest + 1)
                waits.setdefault(rank, Wait(name, lowest + 1, call or Call("collective"), known[rank].idle))
    return waits


def _runs(rank: RankCalls) -> bool:
    return rank.state == "running"


def _is_busy(rank: RankCalls) -> bool:
    # A thread that waits for an accelerator uses a whole core by default, and so do threads of NCCL.
    used = rank.cpu_of_children if rank.on_accelerator else rank.cpu
    return rank.moved or (used is not None and used >= _BUSY_SHARE)


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
