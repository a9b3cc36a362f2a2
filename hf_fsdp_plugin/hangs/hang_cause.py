"""Finds why ranks wait in a collective: a pure function of what is known of each rank. Linear in the number of ranks.

A collective has a number in its process group. The ranks of the group that have not begun it are late. If a late rank
itself waits in another collective, the ranks late for that one are the cause, and so on; a circle means that ranks
wait for each other in different calls. If nobody is late, or the late rank made other calls before, the first call in
which the records of the ranks differ is the cause: gathers of equally large layers are mixed without an error when a
rank skips one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple

from hf_fsdp_plugin.hangs.calls import ARRIVALS, POINT_TO_POINT, Call, GroupCalls, RankCalls, Wait
from hf_fsdp_plugin.hangs.python_stacks import Frame
from hf_fsdp_plugin.text import name_ranks, plural

HangKind = Literal["late", "different", "circle", "stuck"]
_MAX_SKIPPED: Final = 64
"""Maximum number of calls that a rank may have skipped, and of later calls that are compared to find this out."""
_MAX_CALLS: Final = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """The first collective of a process group in which ranks differ.

    Attributes:
        group: the process group.
        number: the number of the collective in the group.
        calls: what ranks called, the call of most ranks first.
        ranks: the ranks that are the reason, as far as that is known.
        reason: a sentence on what they did otherwise, after a space; empty if that is unknown.
    """

    group: str
    number: int
    calls: tuple[tuple[Call, tuple[int, ...]], ...]
    ranks: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        calls = "; ".join(f"{name_ranks(ranks)}: {call}" for call, ranks in self.calls[:_MAX_CALLS])
        where = "the plugin's calls" if self.group == ARRIVALS else f"process group {self.group}"
        return f"ranks made different collective calls. Number {self.number} of {where} was on {calls}.{self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Why ranks wait.

    Attributes:
        kind: ``late``: ranks have not begun the collective and wait in none, or are halted, gone or unreachable;
            ``different``: ranks called different collectives; ``circle``: ranks wait for each other in different calls;
            ``stuck``: all ranks have begun the same collective, and it does not end.
        ranks: the ranks that cause it; all that wait for each other in a circle; empty if nobody is late.
        waiting: the collective that has been waited for the longest.
        others: further collectives in which ranks wait.
        difference: the first difference; ``None`` without one.
        is_busy: whether each late rank may still come.
        known: what is known of all ranks of the run, by rank.
    """

    kind: HangKind
    ranks: tuple[int, ...]
    waiting: Wait
    others: tuple[Wait, ...] = ()
    difference: Difference | None = None
    is_busy: bool = False
    known: Mapping[int, RankCalls] = field(default_factory=dict)

    def stack_of(self, rank: int) -> list[Frame]:
        """Return the Python stack of a rank, outermost frame first; empty if it is unknown."""
        return [Frame(*each) for each in self.known[rank].stack] if rank in self.known else []


def diagnose_hang(ranks: Iterable[RankCalls], *, limit: float) -> Diagnosis | None:
    """Return why ranks have waited for ``limit`` seconds; ``None`` if none has.

    Args:
        limit: seconds that at least one rank must have waited. If no rank is in one, as
            on accelerators, whose collectives are only enqueued, a rank waits if it has been idle for that time and
            has begun collectives that another rank of the group has not begun.
    """
    run = _Run(ranks)
    waits = run.waits(limit)
    if max((wait.seconds for wait in waits.values()), default=0.0) < limit:
        return None
    longest, *others = _grouped(waits)
    difference = run.first_difference(longest.group)
    causes, circle = run.follow(longest, waits)
    # A process that was stopped after it had begun the collective is not late, but the collective cannot end.
    states = {rank: run.known[rank].state for rank in run.members.get(longest.group, ())}
    gone = {rank for rank, state in states.items() if state in ("halted", "exited", "unreachable")}
    gone.update(rank for rank in causes if run.known[rank].state != "running")
    kind: HangKind = "late"
    named: Iterable[int] = gone or causes
    if not gone and difference is not None:
        kind, named = "different", difference.ranks
    elif not named and circle:
        kind, named = "circle", {*circle, *longest.ranks}
    elif not named:
        kind = "stuck"
    return Diagnosis(
        kind=kind,
        ranks=tuple(sorted(named)),
        waiting=longest,
        others=tuple(others),
        difference=difference,
        is_busy=kind == "late" and not gone and all(run.known[rank].is_busy for rank in causes),
        known=run.known,
    )


def compare_calls(ranks: Iterable[RankCalls]) -> str:
    """Return sentences on the collectives of ranks after a failure of the communication; empty if they are equal.

    They are on the first difference; or else on the first collective that some ranks had begun and others had not.
    """
    run = _Run(ranks)
    if (difference := run.first_difference()) is not None:
        return str(difference)
    for name, members in run.members.items():
        lasts = {rank: run.last(rank, name) for rank in members}
        ahead = [rank for rank, last in lasts.items() if last > min(lasts.values())]
        if ahead and name != POINT_TO_POINT:
            number = min(lasts.values()) + 1
            if (call := run.known[ahead[0]].groups[name].call(number)) is not None:
                return f"only {name_ranks(ahead)} had begun {call}, number {number} of process group {name}."
    return ""


class _Class(NamedTuple):
    """Ranks that have made the same calls in a process group."""

    calls: GroupCalls
    ranks: tuple[int, ...]


class _Run:
    """The ranks of a run.

    Attributes:
        known: what is known of each rank.
        members: the ranks of each process group, also those that have not recorded anything of it.
    """

    def __init__(self, ranks: Iterable[RankCalls]) -> None:
        self.known = {rank.rank: rank for rank in ranks}
        packed = {name: group.ranks for rank in self.known.values() for name, group in rank.groups.items()}
        everyone = sorted(self.known)
        self.members = {
            name: [rank for rank in members if rank in self.known] if members else everyone
            for name, members in packed.items()
        }

    def last(self, rank: int, group: str) -> int:
        """Return the number of the newest collective of a rank in a group; 0 before the first."""
        groups = self.known[rank].groups
        return groups[group].last if group in groups else 0

    def waits(self, limit: float) -> dict[int, Wait]:
        """Return the collectives in which ranks wait."""
        running = {number: rank for number, rank in self.known.items() if rank.state == "running"}
        waits = {number: rank.wait for number, rank in running.items() if rank.wait is not None}
        if waits := {number: wait for number, wait in waits.items() if wait.seconds >= min(1.0, limit / 2)}:
            return waits
        # Or else the enqueued collectives for which others are late, if no rank has moved for the limit.
        enqueued = {name for rank in self.known.values() for name, group in rank.groups.items() if group.enqueues}
        for name in filter(enqueued.__contains__, self.members):
            lasts = {rank: self.last(rank, name) for rank in self.members[name]}
            number = min(lasts.values(), default=0) + 1
            for rank, last in lasts.items():
                if last >= number and rank in running and running[rank].idle >= limit:
                    call = running[rank].groups[name].call(number) or Call("collective")
                    waits.setdefault(rank, Wait(name, number, call, running[rank].idle))
        return waits

    def follow(self, longest: Wait, waits: Mapping[int, Wait]) -> tuple[set[int], set[int]]:
        """Return the late ranks that wait in no collective, and all that wait if there are none.

        Each collective is followed once.
        """
        causes, circle, seen = set[int](), set[int](), set[tuple[str, int]]()
        rest = self._late(longest)
        while rest:
            rank = rest.pop()
            if (wait := waits.get(rank)) is None:
                causes.add(rank)
                continue
            circle.add(rank)
            if (wait.group, wait.number) not in seen:
                seen.add((wait.group, wait.number))
                rest += self._late(wait)
        return causes, set() if causes else circle

    def _late(self, awaited: Wait) -> list[int]:
        """Return the ranks that have not begun a collective."""
        if awaited.group == POINT_TO_POINT:
            return [rank for rank in self.known if rank == awaited.call.peer]
        return [rank for rank in self.members.get(awaited.group, ()) if self.last(rank, awaited.group) < awaited.number]

    def first_difference(self, first: str = "") -> Difference | None:
        """Return the difference in one of the groups. The group ``first`` is searched first."""
        names = sorted(self.members, key=lambda name: name != first)
        return next((found for name in names if (found := self._difference(name)) is not None), None)

    def _difference(self, name: str) -> Difference | None:
        """Return the first recorded collective of a group in which its ranks differ; ``None`` without one."""
        if name == POINT_TO_POINT:
            return None
        # Most ranks have made the same calls, so that one of each kind is compared.
        kinds: dict[GroupCalls, list[int]] = defaultdict(list)
        for rank in self.members[name]:
            if name in self.known[rank].groups:
                kinds[self.known[rank].groups[name]].append(rank)
        if len(kinds) < 2:
            return None
        for number in range(max(group.first for group in kinds), min(group.last for group in kinds) + 1):
            found: dict[tuple[Any, ...], list[GroupCalls]] = defaultdict(list)
            for group in kinds:
                found[group.calls[number - group.first].compared].append(group)
            if len(found) > 1:
                classes = [
                    _Class(each[0], tuple(sorted(rank for group in each for rank in kinds[group])))
                    for each in found.values()
                ]
                classes.sort(key=lambda each: (-len(each.ranks), each.ranks[0]))
                calls = tuple((each.calls.since(number)[0], each.ranks) for each in classes)
                return Difference(name, number, calls, *self._reason(number, classes))
        return None

    def _reason(self, number: int, classes: Sequence[_Class]) -> tuple[tuple[int, ...], str]:
        """Return the ranks that are the reason for a difference, and the sentence on it.

        In this order: ranks that have called the model more or less often; ranks that have left calls out; ranks that
        differ from most others; in a tie, those that have made an unusual call; or all.
        """
        is_tie = len(classes[0].ranks) == len(classes[1].ranks)
        named = _ranks_of(classes if is_tie else classes[1:])
        ahead, most, few = self._more_forwards(number, classes)
        if ahead:
            named = ahead if is_tie else named
            counts = (most, few) if named == ahead else (few, most)
            own, others = ({1: "once", 2: "twice"}.get(count, f"{count:,} times") for count in counts)
            return named, f" {name_ranks(named).capitalize()} had called the model {own}, the others {others}."
        odd, left_out = _odd_ranks(number, classes)
        if left_out:
            more = f" and {plural(len(left_out) - 1, 'more call')}" if len(left_out) > 1 else ""
            return odd, f" {name_ranks(odd).capitalize()} left out {left_out[0]}{more}."
        if odd and (is_tie or odd == named):
            return odd, f" In earlier steps, the call before was not followed by that of {name_ranks(odd)}."
        return named, ""

    def _more_forwards(self, number: int, classes: Sequence[_Class]) -> tuple[tuple[int, ...], int, int]:
        """Return the ranks that have called the model more often than the others after the same optimizer steps.

        A rank does that which evaluates alone. Also returns the numbers of calls of these ranks and of the others. If
        a call is not one of a unit, a rank may be ahead in the model because the others make a call outside of it.
        """
        ranks = _ranks_of(classes if all(each.calls.since(number)[0].unit for each in classes) else ())
        counts = {rank: found for rank in ranks if (found := self.known[rank].counts) is not None}
        forwards = sorted({each.forwards for each in counts.values()})
        if len(counts) < len(ranks) or len({each.steps for each in counts.values()}) != 1 or len(forwards) != 2:
            return (), 0, 0
        few, most = forwards
        return tuple(rank for rank in ranks if counts[rank].forwards == most), most, few


def _ranks_of(classes: Iterable[_Class]) -> tuple[int, ...]:
    return tuple(sorted(rank for each in classes for rank in each.ranks))


def _grouped(waits: Mapping[int, Wait]) -> list[Wait]:
    """Return the collectives in which ranks wait, the one that has been waited for the longest first."""
    ranks: dict[tuple[str, int, Call], list[int]] = defaultdict(list)
    for rank, wait in waits.items():
        ranks[wait.group, wait.number, wait.call].append(rank)
    found = [Wait(*key, max(waits[rank].seconds for rank in own), tuple(sorted(own))) for key, own in ranks.items()]
    return sorted(found, key=lambda each: (-each.seconds, each.group, each.number))


def _odd_ranks(number: int, classes: Sequence[_Class]) -> tuple[tuple[int, ...], Sequence[Call]]:
    """Return the ranks whose call did not follow the last common one in earlier steps, and the calls they left out.

    The calls are those that the other class of ranks has made since the difference, continued by those of an earlier
    step: a backend may fail or wait soon after the difference. Both are empty if that is unknown.

    Args:
        number: number of the first collective in which the classes differ.
    """
    past, nexts = classes[0].calls.before(number), [each.calls.since(number)[0] for each in classes]
    at = [_last_pair(past, call) for call in nexts]
    is_known = sum(each is not None for each in at) == 1
    odd = _ranks_of(each for each, found in zip(classes, at, strict=True) if found is None) if is_known else ()
    found = []
    for most, few, before in zip(classes, classes[::-1], at, strict=True) if len(classes) == 2 else ():
        if is_known and before is None:
            continue
        made = most.calls.since(number)
        expected = past[before:]  # how the step went on before
        if is_known and [call.compared for call in expected[: len(made)]] == [call.compared for call in made]:
            made = expected
        if num := _num_skipped(made, few.calls.since(number)):
            found.append((few.ranks, made[:num]))
    # If both left calls out, the orders differ. The shorter gap is the likelier one; in a tie nobody is named.
    found.sort(key=lambda each: len(each[1]))
    return found[0] if found and len({len(calls) for _, calls in found}) == len(found) else (odd, ())


def _last_pair(past: Sequence[Call], call: Call) -> int | None:
    """Return where a call has followed the last one of ``past`` before; ``None`` if it never has."""
    pairs = [(each.compared, after.compared) for each, after in pairwise(past)]
    pair = (past[-1].compared, call.compared) if past else None
    return next((at + 1 for at in reversed(range(len(pairs))) if pairs[at] == pair), None)


def _num_skipped(other: Sequence[Call], own: Sequence[Call]) -> int:
    """Return after how many calls of ``other`` its next calls equal those of ``own``; 0 if there is no such number."""
    made, made_by_own = ([call.compared for call in calls[: 2 * _MAX_SKIPPED]] for calls in (other, own))
    for num in range(1, min(_MAX_SKIPPED, len(made))):
        overlap = min(len(made_by_own), len(made) - num, _MAX_SKIPPED)
        if made[num : num + overlap] == made_by_own[:overlap]:
            return num
    return 0
