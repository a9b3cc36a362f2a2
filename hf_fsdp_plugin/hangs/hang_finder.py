"""Watches whether the ranks of this machine hang: reads their records, asks the other machines, and reports the cause.

A hang is a collective that a rank has waited for longer than a limit. See docs/hangs.md for the rules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hf_fsdp_plugin.hangs.call_record import RecordHeader, read_calls, read_header
from hf_fsdp_plugin.hangs.calls import RankCalls
from hf_fsdp_plugin.hangs.diagnose import diagnose_hang
from hf_fsdp_plugin.hangs.hang_queries import HangQueries
from hf_fsdp_plugin.hangs.hang_report import Hang, describe_busy, describe_standstill
from hf_fsdp_plugin.hangs.rank_exit import read_failure, stack_of
from hf_fsdp_plugin.hangs.rank_files import Peer, ProcessorUse, is_halted, processor_use
from hf_fsdp_plugin.hangs.rank_stacks import Frame, find_place, read_stack, waits_for_data

_TIMEOUT_SHARE: Final = 0.5
"""Longest limit, as a part of the time-out of the process groups."""
_BUSY_TIMEOUT_SHARE: Final = 0.9
"""Longest limit for late ranks that are busy, as a part of the time-out of the process groups."""
_READING_LIMITS: Final = 5.0
"""Factor of the limit for late ranks that wait for a file system or a data loader, which may stall for minutes."""
_STANDSTILL_LIMITS: Final = 5.0
"""Factor of the limit for a time without any collective, after which a notice is printed."""
_STACK_SECONDS: Final = 0.2
"""Seconds that ranks have to record their stacks."""
_MORE_STACKS: Final = 4
"""Further stacks that are read if ranks on accelerators have not moved: their processor time shows no progress."""
_FAULTS: Final = 10.0
"""Page faults per second that are progress: memory that is touched for the first time."""
_SAMPLE_SECONDS: Final = 1.0
"""Seconds for which the processor time is measured if no rank waits on this machine."""


@dataclass(slots=True)
class _Sample:
    """Processor time and stacks of the ranks of this machine at one time."""

    time: float
    use: Mapping[int, ProcessorUse]
    stacks: Mapping[int, Sequence[Frame]]


class HangFinder:
    """Finds hangs of the ranks of this machine.

    Args:
        limit: seconds that a rank may wait in a collective.
        is_strict: whether the limit also holds for late ranks that are busy or wait for files. Otherwise these are
            named in a notice, and the limit is 0.9 of the time-out of the process groups; for files, at most five
            limits.
        hang_queries: asks the other machines.
        notice: prints a message for the user.
    """

    def __init__(
        self, *, limit: float, is_strict: bool, hang_queries: HangQueries, notice: Callable[[object], None]
    ) -> None:
        self._limit, self._is_strict = limit, is_strict
        self._queries, self._notice = hang_queries, notice
        self._next_diagnosis = 0.0
        self._sample: _Sample | None = None
        self._noticed: set[tuple[object, ...]] = set()
        self._has_stood_still = False

    def poll(self, ranks: Sequence[Peer]) -> Hang | None:
        """Return a hang that ends the run, if there is one. Reads some bytes per rank and second until ranks wait."""
        self.answer(ranks)
        now = time.monotonic()
        headers = {rank.rank: found for rank in ranks if (found := read_header(rank.files.calls)) is not None}
        # The longest wait in a collective or, if no rank is in one, the shortest time without a new one.
        longest = max((found.waiting for found in headers.values()), default=0.0)
        longest = longest or min((found.idle for found in headers.values() if found.count), default=0.0)
        limit = self._effective_limit(ranks, headers) if longest >= min(1.0, self._limit / 2) else self._limit
        if longest < limit / 2:
            self._sample = None
            return None
        if self._sample is None:
            self._sample = self._take_sample(ranks)
        if longest < limit or now < self._next_diagnosis:
            return None
        self._next_diagnosis = now + limit / 4
        return self._diagnose(ranks, limit, longest)

    def answer(self, ranks: Sequence[Peer]) -> None:
        """Answer the questions of other machines."""
        if self._queries.is_asked():
            self._queries.answer(self._read(ranks)[0])

    def _effective_limit(self, ranks: Sequence[Peer], headers: Mapping[int, RecordHeader]) -> float:
        """Return the limit for the rank that waits the longest. Groups have different time-outs."""
        longest = max(ranks, key=lambda rank: headers[rank.rank].waiting if rank.rank in headers else 0.0)
        timeout = _timeout(read_calls(longest.rank, longest.files.calls))
        return min(self._limit, _TIMEOUT_SHARE * timeout) if timeout else self._limit

    def _diagnose(self, ranks: Sequence[Peer], limit: float, longest: float) -> Hang | None:
        own, stacks = self._read(ranks)
        others = self._queries.ask(own)
        if others is None:
            return None
        diagnosis = diagnose_hang([*own, *others], limit=limit)
        if diagnosis is None:
            if longest >= _STANDSTILL_LIMITS * limit and not self._has_stood_still:
                self._has_stood_still = True
                self._notice(describe_standstill(own, longest))
            return None
        timeouts = [timeout for rank in diagnosis.waiting.ranks if (timeout := _timeout(diagnosis.known[rank]))]
        ends_after = _BUSY_TIMEOUT_SHARE * min(timeouts, default=float("inf"))
        if not diagnosis.is_busy:
            ends_after = min(ends_after, _READING_LIMITS * limit) if diagnosis.reads else 0.0
        if not self._is_strict and diagnosis.waiting.seconds < ends_after:
            key = (diagnosis.ranks, diagnosis.waiting.group, diagnosis.waiting.number)
            if key not in self._noticed:
                self._noticed.add(key)
                self._notice(describe_busy(diagnosis, ends_after))
            self._sample = self._take_sample(ranks)
            self._next_diagnosis = time.monotonic() + limit / 2  # the processor time is measured until then
            return None
        return Hang(diagnosis=diagnosis, stacks=stacks)

    def _read(self, ranks: Sequence[Peer]) -> tuple[list[RankCalls], dict[int, Sequence[Frame]]]:
        """Return the calls and states of the ranks of this machine, and their stacks."""
        before = self._sample
        if before is None:
            before = self._take_sample(ranks)
            time.sleep(_SAMPLE_SECONDS)
        after = self._take_sample(ranks)
        seconds = max(after.time - before.time, 1e-3)
        calls = {rank.rank: read_calls(rank.rank, rank.files.calls) for rank in ranks}
        moved = _moved(before, after)
        on_accelerator = {number for number, found in calls.items() if found.on_accelerator}
        for _ in range(_MORE_STACKS):
            if on_accelerator <= moved:
                break
            moved |= _moved(before, self._take_sample(ranks))
        found = []
        for rank in ranks:
            known = calls[rank.rank]
            stack = stack_of(read_failure(rank.files.failure)) or after.stacks[rank.rank]
            call, place = find_place(stack, known.counts)
            old, new = before.use.get(rank.pid, ProcessorUse()), after.use.get(rank.pid, ProcessorUse())
            works = old.runs and new.runs
            if known.on_accelerator:
                works = new.faults - old.faults >= _FAULTS * seconds
            state = _state(rank)
            used, of_children = new.seconds - old.seconds, new.seconds_of_children - old.seconds_of_children
            found.append(
                replace(
                    known,
                    state=state,
                    place=place,
                    call=call,
                    cpu=max(0.0, used) / seconds if state == "running" else None,
                    cpu_of_children=max(0.0, of_children) / seconds if state == "running" else None,
                    moved=rank.rank in moved or works,
                    reads=old.in_file_system or new.in_file_system or waits_for_data(stack),
                )
            )
        return found, dict(after.stacks)

    def _take_sample(self, ranks: Sequence[Peer]) -> _Sample:
        # Read first, because the ranks use processor time when they handle the signal.
        now, use = time.monotonic(), processor_use([rank.pid for rank in ranks])
        for rank in ranks:
            if not rank.is_gone():
                rank.request_stacks()
        time.sleep(_STACK_SECONDS)
        return _Sample(now, use, {rank.rank: tuple(read_stack(rank.files.stacks)) for rank in ranks})


def _moved(before: _Sample, after: _Sample) -> set[int]:
    """Return the ranks whose Python stacks differ."""
    return {rank for rank, stack in after.stacks.items() if stack and stack != before.stacks.get(rank, stack)}


def _timeout(rank: RankCalls) -> float:
    """Return the time-out of the group in which a rank waits, or else of its newest collective; 0 if it is unknown."""
    group = rank.wait.group if rank.wait is not None else rank.last_group
    return rank.groups[group].timeout if group in rank.groups else 0.0


def _state(rank: Peer) -> str:
    if rank.files.ended.exists():
        return "ended"
    if rank.is_gone():
        return "exited"
    return "halted" if is_halted(rank.pid) else "running"
