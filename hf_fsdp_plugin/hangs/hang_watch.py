"""Watches whether the ranks of this machine hang: reads their records, asks the other machines, and finds the cause.

A hang is a collective that a rank has waited for longer than a limit. See docs/hangs.md for the rules.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.hangs import python_stacks, watch_files
from hf_fsdp_plugin.hangs.calls import RankCalls, read_calls, read_header
from hf_fsdp_plugin.hangs.hang_cause import Diagnosis, diagnose_hang
from hf_fsdp_plugin.hangs.hang_queries import HangQueries
from hf_fsdp_plugin.hangs.hang_texts import describe_busy, describe_standstill, hang_problem
from hf_fsdp_plugin.hangs.process_end import stack_of
from hf_fsdp_plugin.hangs.watch_files import Peer, ProcessorUse
from hf_fsdp_plugin.version import SCHEMA_VERSION

_TIMEOUT_SHARE: Final = 0.5
"""Longest limit, as a part of the time-out of the process groups."""
_BUSY_TIMEOUT_SHARE: Final = 0.9
"""Longest limit for late ranks that are busy, as a part of the time-out of the process groups."""
_STANDSTILL_LIMITS: Final = 5.0
"""Factor of the limit for a time without any collective, after which a notice is printed."""
_MORE_STACKS: Final = 4
"""Further stacks that are read if ranks on accelerators have not moved: their processor time shows no progress."""
_BUSY_SHARE: Final = 0.03
"""Share of one core from which on a late rank is busy. Threads of idle processes use less than 1%."""
_FAULTS: Final = 10.0
"""Page faults per second that are progress: memory that is touched for the first time."""


@dataclass(slots=True)
class _Sample:
    """Processor time of the ranks of this machine until ``time``, and their stacks soon after it."""

    time: float
    use: Mapping[int, ProcessorUse]
    stacks: Mapping[int, Sequence[python_stacks.Frame]]


class HangFinder:
    """Finds hangs of the ranks of this machine.

    Args:
        limit: seconds that a rank may wait in a collective.
        is_strict: whether the limit also holds for late ranks that are busy or wait for files. Otherwise these are
            named in a notice, and the limit is 0.9 of the time-out of the process groups.
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

    def poll(self, ranks: Sequence[Peer]) -> Diagnosis | None:
        """Return a hang that ends the run, if there is one. Reads some bytes per rank and second until ranks wait."""
        self.answer(ranks)
        now = time.monotonic()
        headers = {rank.rank: found for rank in ranks if (found := read_header(rank.files.calls)) is not None}
        # The longest wait in a collective or, if no rank is in one, the shortest time without a new one.
        longest = max((found.waiting for found in headers.values()), default=0.0)
        longest = longest or min((found.idle for found in headers.values() if found.count), default=0.0)
        limit = self._limit
        if longest >= min(1.0, limit / 2):  # groups have different time-outs
            rank = max(ranks, key=lambda rank: headers[rank.rank].waiting if rank.rank in headers else 0.0)
            limit = min(limit, _TIMEOUT_SHARE * (_timeout(read_calls(rank.rank, rank.files.calls)) or float("inf")))
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
            self._queries.answer(self._read(ranks))

    def _diagnose(self, ranks: Sequence[Peer], limit: float, longest: float) -> Diagnosis | None:
        own = self._read(ranks)
        others = self._queries.ask(own)
        if others is None:
            return None
        diagnosis = diagnose_hang([*own, *others], limit=limit)
        if diagnosis is None:
            if longest >= _STANDSTILL_LIMITS * limit and not self._has_stood_still:
                self._has_stood_still = True
                self._notice(describe_standstill(own, longest))
                watch_files.write_if_possible(ranks[0].files.standstill, "")  # the ranks write their flight records
            return None
        timeouts = [timeout for rank in diagnosis.waiting.ranks if (timeout := _timeout(diagnosis.known[rank]))]
        ends_after = _BUSY_TIMEOUT_SHARE * min(timeouts, default=float("inf"))
        if diagnosis.is_busy and not self._is_strict and diagnosis.waiting.seconds < ends_after:
            key = (diagnosis.ranks, diagnosis.waiting.group, diagnosis.waiting.number)
            if key not in self._noticed:
                self._noticed.add(key)
                self._notice(describe_busy(diagnosis, ends_after))
            self._sample = self._take_sample(ranks)
            self._next_diagnosis = time.monotonic() + limit / 2  # the processor time is measured until then
            return None
        return diagnosis

    def _read(self, ranks: Sequence[Peer]) -> list[RankCalls]:
        """Return the calls and states of the ranks of this machine, and their stacks."""
        before = self._sample or self._take_sample(ranks)
        # On a busy machine, the sample may have taken until now.
        time.sleep(max(0.0, before.time + min(time_limits.SAMPLE, self._limit / 2) - time.monotonic()))
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
            stack = stack_of(watch_files.read_json(rank.files.failure)) or after.stacks[rank.rank]
            call, place = python_stacks.find_place(stack, known.counts)
            old, new = before.use.get(rank.pid, ProcessorUse()), after.use.get(rank.pid, ProcessorUse())
            state = _state(rank)
            found.append(
                replace(
                    known,
                    state=state,
                    place=place,
                    call=call,
                    cpu=max(0.0, new.seconds - old.seconds) / seconds if state == "running" else None,
                    is_busy=rank.rank in moved
                    or (state != "halted" and has_worked(old, new, seconds, known.on_accelerator))
                    or (old.in_file_system or new.in_file_system or python_stacks.waits_for_data(stack)),
                    stack=tuple((each.file, each.line, each.name, each.source) for each in after.stacks[rank.rank]),
                )
            )
        return found

    def _take_sample(self, ranks: Sequence[Peer]) -> _Sample:
        # Read first, because the ranks use processor time when they handle the signal.
        use, now = watch_files.processor_use([rank.pid for rank in ranks]), time.monotonic()
        for rank in ranks:
            rank.request_stacks()
        time.sleep(time_limits.STACK)
        return _Sample(now, use, {rank.rank: tuple(python_stacks.read_stack(rank.files.stacks)) for rank in ranks})


def has_worked(old: ProcessorUse, new: ProcessorUse, seconds: float, on_accelerator: bool) -> bool:
    """Return whether the processes of a rank have worked in the ``seconds`` between two times."""
    if not on_accelerator:
        return new.seconds - old.seconds >= _BUSY_SHARE * seconds
    # A thread that waits for an accelerator uses a whole core by default, and so do threads of NCCL.
    of_children = new.seconds_of_children - old.seconds_of_children
    return of_children >= _BUSY_SHARE * seconds or new.faults - old.faults >= _FAULTS * seconds


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
    return "halted" if watch_files.is_halted(rank.pid) else "running"


def write_hang(diagnosis: Diagnosis, folder: Path | None, *, limit: float) -> Path | None:
    """Write the dump, and return its path; ``None`` if the folder cannot be written.

    Args:
        folder: where the user wants logs. By default the working directory.
    """
    problem, ranks = hang_problem(diagnosis), [rank for _, rank in sorted(diagnosis.known.items())]
    content = {
        "schema": SCHEMA_VERSION,
        "time": time.time(),
        "limit_seconds": limit,
        "code": problem.code,
        "message": problem.message,
        "kind": diagnosis.kind,
        "ranks": diagnosis.ranks,
        "waiting": [asdict(each) | each.call._asdict() for each in (diagnosis.waiting, *diagnosis.others)],
        "difference": diagnosis.difference and asdict(diagnosis.difference),
        "calls_of_ranks": [replace(rank, stack=()).to_json() for rank in ranks],
        "stacks": {str(rank.rank): list(map(asdict, diagnosis.stack_of(rank.rank))) for rank in ranks if rank.stack},
    }
    path = (folder or Path()) / f"fsdp_hang_{time.strftime('%Y%m%d_%H%M%S')}.json"
    watch_files.write_if_possible(path, json.dumps(content, indent=1))
    return path if path.exists() else None
