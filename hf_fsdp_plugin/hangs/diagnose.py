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
from typing import Any, Final, Literal, NamedTuple

from hf_fsdp_plugin.hangs.calls import POINT_TO_POINT, Call, GroupCalls, RankCalls, Wait, unpack_ranks

HangKind = Literal["late", "different", "circle", "stuck"]
_MAX_SKIPPED: Final = 64
"""Maximum number of calls that a rank may have skipped, and of later calls that are compared to find this out."""
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
            optimizer steps, and the numbers of calls of these ranks and of the others; for calls of units only.
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
    longest, *others = _grouped(waits)
    difference = _first_difference(known, members, longest.group)
    causes, circle = _follow(_late(longest.group, longest.number, longest.call, known, members), waits, known, members)
    # A process that was stopped after it had begun the collective is not late, but the collective cannot end.
    gone = {rank for rank in members.get(longest.group, ()) if known[rank].state in ("halted", "exited", "unreachable")}
    gone.update(rank for rank in causes if not _runs(known[rank]))
    kind: HangKind = "late"
    named: Iterable[int] = gone or causes
    if not gone and difference is not None:
        kind, named = "different", difference.ranks
    elif not named and circle:
        kind, named = "circle", {*circle, *longest.ranks}
    elif not named:
        kind = "stuck"
    is_late = kind == "late" and not gone
    return Diagnosis(
        kind=kind,
        ranks=tuple(sorted(named)),
        waiting=longest,
        others=tuple(others),
        difference=difference,
        is_busy=is_late and all(_is_busy(known[rank]) for rank in causes),
        reads=is_late and all(known[rank].reads or _is_busy(known[rank]) for rank in causes),
    )


def compare_calls(ranks: Iterable[RankCalls]) -> Difference | Waiting | None:
    """Return the first difference between the records of ranks after a failure of the communication.

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
    """Return the difference in one of the groups. The group ``first`` is searched first."""
    for name in [first, *members] if first else members:
        if (found := find_difference(name, known, members.get(name, ()))) is not None:
            return found
    return None


class _Class(NamedTuple):
    """Ranks that have made the same calls in a process group."""

    calls: GroupCalls
    ranks: list[int]


def find_difference(name: str, known: Mapping[int, RankCalls], members: Sequence[int]) -> Difference | None:
    """Return the first recorded collective of a group in which its ranks differ; ``None`` without one."""
    if name == POINT_TO_POINT:
        return None
    # Most ranks have made the same calls, so that one of each kind is compared.
    kinds: dict[GroupCalls, list[int]] = {}
    for rank in members:
        if name in known[rank].groups:
            kinds.setdefault(known[rank].groups[name], []).append(rank)
    if len(kinds) < 2:
        return None
    for number in range(max(group.first for group in kinds), min(group.last for group in kinds) + 1):
        found: dict[tuple[Any, ...], list[GroupCalls]] = {}
        for group in kinds:
            found.setdefault(group.calls[number - group.first].compared, []).append(group)
        if len(found) > 1:
            classes = [
                _Class(each[0], sorted(rank for group in each for rank in kinds[group])) for each in found.values()
            ]
            classes.sort(key=lambda each: (-len(each.ranks), each.ranks[0]))
            return _difference(name, number, classes, known)
    return None


def _difference(name: str, number: int, classes: Sequence[_Class], known: Mapping[int, RankCalls]) -> Difference:
    calls = tuple((each.calls.calls[number - each.calls.first], tuple(each.ranks)) for each in classes)
    # Without a unit, a rank may be ahead in the model because the others make a call outside of it.
    in_model = all(call.unit for call, _ in calls)
    forwards = _more_forwards([known[rank] for each in classes for rank in each.ranks] if in_model else ())
    skipped: tuple[tuple[int, ...], tuple[Call, ...]] = (), ()
    if len(classes) == 2:
        skipped = _skipped(number, classes)
        if not skipped[0] and not forwards[0]:
            skipped = _skipped_by_history(number, classes)
    return Difference(name, number, calls, skipped, _unusual(number, classes), forwards)


def _more_forwards(ranks: Sequence[RankCalls]) -> tuple[tuple[int, ...], int, int]:
    """Return the ranks that have called the model more often than the others, as a rank does that evaluates alone."""
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


def _late(
    group: str, number: int, call: Call, known: Mapping[int, RankCalls], members: Mapping[str, Sequence[int]]
) -> tuple[int, ...]:
    """Return the ranks that have not begun a collective."""
    if group == POINT_TO_POINT:
        return (call.peer,) if call.peer is not None and call.peer in known else ()
    return tuple(rank for rank in members[group] if _last(known[rank], group) < number)


def _last(rank: RankCalls, group: str) -> int:
    return rank.groups[group].last if group in rank.groups else 0


def _follow(
    late: Sequence[int], waits: Mapping[int, Wait], known: Mapping[int, RankCalls], members: Mapping[str, Sequence[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the late ranks that wait in no collective, and all that wait if there are none.

    Each collective is followed once.
    """
    causes, circle, seen = set[int](), set[int](), set[tuple[str, int]]()
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
            rest += _late(wait.group, wait.number, wait.call, known, members)
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


def _skipped(number: int, classes: Sequence[_Class]) -> tuple[tuple[int, ...], tuple[Call, ...]]:
    """Return which of two classes of ranks has left out calls that the other made, and these calls.

    Both are empty if that is unknown.

    Args:
        number: number of the first collective in which the classes differ.
    """
    found = []
    for most, few in (classes, classes[::-1]):
        made = most.calls.since(number)
        if num := _num_skipped(made, few.calls.since(number)):
            found.append((tuple(few.ranks), made[:num]))
    # If both left calls out, the orders differ. The shorter gap is the likelier one; in a tie nobody is named.
    found.sort(key=lambda each: len(each[1]))
    if not found or (len(found) == 2 and len(found[0][1]) == len(found[1][1])):
        return (), ()
    return found[0]


def _num_skipped(other: Sequence[Call], own: Sequence[Call]) -> int:
    """Return after how many calls of ``other`` its next calls equal those of ``own``; 0 if there is no such number."""
    made, made_by_own = ([call.compared for call in calls[: 2 * _MAX_SKIPPED]] for calls in (other, own))
    for num in range(1, min(_MAX_SKIPPED, len(made))):
        overlap = min(len(made_by_own), len(made) - num, _MAX_SKIPPED)
        if made[num : num + overlap] == made_by_own[:overlap]:
            return num
    return 0


def _unusual(number: int, classes: Sequence[_Class]) -> tuple[int, ...]:
    """Return the ranks whose call did not follow the last common call in earlier steps, if one class's call did."""
    past = [call.compared for call in classes[0].calls.before(number)]
    follows = set(pairwise(past))
    usual = [each for each in classes if past and (past[-1], each.calls.since(number)[0].compared) in follows]
    if len(usual) != 1:
        return ()
    return tuple(sorted(rank for each in classes if each is not usual[0] for rank in each.ranks))


def _skipped_by_history(number: int, classes: Sequence[_Class]) -> tuple[tuple[int, ...], tuple[Call, ...]]:
    """Return which of two classes has left calls out, judged by the calls before: a backend may fail at the difference.

    In earlier steps, the last common call was followed by the call of one class only, and later by that of the other.
    """
    past = classes[0].calls.before(number)
    compared = [call.compared for call in past]
    follows = set(pairwise(compared))
    found = []
    for usual, odd in (classes, classes[::-1]):
        after, other = usual.calls.since(number)[0].compared, odd.calls.since(number)[0].compared
        if not past or (compared[-1], other) in follows:
            continue
        for at in range(len(past) - 1, 0, -1):
            if (compared[at - 1], compared[at]) == (compared[-1], after):
                if other in (rest := compared[at : at + _MAX_SKIPPED]):
                    found.append((tuple(odd.ranks), past[at : at + rest.index(other)]))
                break
    return found[0] if len(found) == 1 else ((), ())
