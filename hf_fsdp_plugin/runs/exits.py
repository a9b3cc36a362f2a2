"""How the ranks of a machine exited, from their files: for the launcher, for ranks without one, and for later attempts.

Only a launcher knows exit codes. Under other launchers, a rank that has lost the connection to others looks for the
cause (:func:`find_first_cause`), and the next attempt finds out how the one before has ended (:func:`earlier_exits`).
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.hangs.calls import RankCalls, read_calls
from hf_fsdp_plugin.hangs.process_end import read_crash, stack_of
from hf_fsdp_plugin.hangs.python_stacks import read_stack
from hf_fsdp_plugin.hangs.watch_files import RankFiles, find_peers, read_json
from hf_fsdp_plugin.runs.failures import AttemptResult, RankExit, first_failure, tell_failure

_RANK_FILE: Final = re.compile(r"(rank_(\d+))\.\w+")
_NO_RECORD: Final = {"kind": "exception", "type": "", "frames": [], "traceback": ""}
AskOthers = Callable[[Sequence[RankCalls]], Sequence[RankCalls]]
"""Takes what is known of the ranks of this machine. Returns what is known of the ranks of other machines."""


def read_exit(rank: int, files: RankFiles, *, code: int, time: float, **facts: Any) -> RankExit:
    """Return how a rank exited, from its files and what the caller knows.

    Args:
        code, time: code and time of its exit.
        facts: further fields of :class:`RankExit`.
    """
    failure = read_json(files.failure)
    found = RankExit(
        rank=rank,
        code=code,
        time=failure["time"] if failure is not None else time,
        failure=failure,
        stack=tuple(stack_of(failure)),
        calls=read_calls(rank, files.calls),
        ended=files.ended.exists(),
        **facts,
    )
    if failure is None and (code or not found.code_is_known):
        return replace(found, stack=tuple(read_stack(files.stacks)))
    return found


def find_first_cause(rank: int, files: RankFiles, ask_others: AskOthers, is_told_to_end: Callable[[], bool]) -> str:
    """Return the cause of a lost connection, if other ranks show it; else an empty text, as for other failures.

    Waits for at most two seconds until a rank of this machine has failed for another reason or has exited. Then the
    lowest of its ranks that have lost the connection asks the other machines.

    Args:
        rank, files: rank and files of this process, which has recorded its failure.
        is_told_to_end: whether the launcher ends this process: then half a second is left, and nobody is asked.
    """
    deadline = time.monotonic() + time_limits.CAUSE
    exits = exits_of_machine(files)
    while _is_unknown(rank, exits) and not files.hang.exists() and time.monotonic() < deadline:
        if is_told_to_end():
            deadline = min(deadline, time.monotonic() + time_limits.HURRY)
        time.sleep(time_limits.POLL)
        exits = exits_of_machine(files)
    others = [each for each in exits if each.rank != rank]
    if files.hang.exists() or not any(each.rank == rank and each.has_lost_connection for each in exits):
        return ""
    is_answered = any(each.left_silently or (each.failure is not None and each.rank < rank) for each in others)
    asks = not is_answered and not is_told_to_end()
    elsewhere = ask_others([each.calls for each in exits if each.calls is not None]) if asks else ()
    return tell_failure(_result_of(exits, elsewhere), brief=True)


def _is_unknown(rank: int, exits: Sequence[RankExit]) -> bool:
    """Return whether the ranks of this machine have only lost connections, and none of them shows why."""
    first, others = first_failure(exits), [each for each in exits if each.rank != rank]
    if first is None or not first.has_lost_connection:
        return False
    return not any(each.left_silently for each in others) and any(each.failure is None for each in others)


def cause_of_end(files: RankFiles) -> str:
    """Return which rank of this machine native code has aborted, and why; empty if none has recorded a crash.

    A launcher ends the other ranks then. A rank with an exception prints its own error.

    Args:
        files: the files of this process, which is ended.
    """
    result = _result_of(exits_of_machine(files))
    return tell_failure(result, brief=True) if result.first is not None and result.first.code < 0 else ""


def cause_of_abort(rank: int, files: RankFiles, ask_others: AskOthers) -> str:
    """Return where native code aborts this rank, which is alone on its machine, and what other machines know of it."""
    for found in exits_of_machine(files):
        if found.rank == rank:
            own = replace(found, code=-signal.SIGABRT, code_is_known=True, stopped=False)
            others = ask_others([own.calls] if own.calls is not None else [])
            return tell_failure(_result_of([own], others), brief=True)
    return ""


def exits_of_machine(files: RankFiles) -> list[RankExit]:
    """Return what a rank can know of how the ranks of its machine exited, or that they run."""
    found = []
    for peer in find_peers(files.stem.parent):
        is_gone, has_failed = peer.is_gone(), peer.files.failure.exists()
        crash = read_crash(peer.files.stacks) if is_gone and not has_failed else 0
        if not has_failed and not is_gone and peer.pid != os.getpid():
            peer.request_stacks()
            time.sleep(time_limits.ONE_STACK)
        facts = {"pid": peer.pid, "code_is_known": bool(crash), "stopped": not is_gone}
        found.append(read_exit(peer.rank, peer.files, code=-crash, time=time.time(), **facts))
    return found


def _result_of(exits: Sequence[RankExit], elsewhere: Sequence[RankCalls] = ()) -> AttemptResult:
    """Return how the ranks of this machine exited, with what is known of the ranks of other machines."""
    exited, places = list(exits), []
    for rank in elsewhere:
        facts: dict[str, Any] = {"calls": rank if rank.state != "unreachable" else None, "code_is_known": False}
        exited.append(RankExit(rank=rank.rank, code=0, time=time.time(), stopped=rank.state != "exited", **facts))
        # Whether it has exited is left out: the explanation contains that.
        state = rank.state if rank.state in ("ended", "unreachable") else "running"
        if rank.place or state != "running":
            places.append(replace(rank, state=state))
    return AttemptResult(exits=tuple(exited), elsewhere=places)


def earlier_exits(folder: Path) -> list[RankExit]:
    """Return how the ranks of an earlier attempt have exited, as far as their files in ``folder`` show it."""
    stems = {int(found[2]): found[1] for path in folder.iterdir() if (found := _RANK_FILE.fullmatch(path.name))}
    return [_earlier_exit(rank, RankFiles(folder / stem)) for rank, stem in sorted(stems.items())]


def _earlier_exit(rank: int, files: RankFiles) -> RankExit:
    last = max((path.stat().st_mtime for path in files.stem.parent.glob(f"{files.stem.name}.*")), default=0.0)
    found = read_exit(rank, files, code=1, time=last)
    if found.failure is not None:
        return found
    if found.ended:
        return replace(found, code=0)
    if crash := read_crash(files.stacks):
        return replace(found, code=-crash)
    # The stack of a rank that the launcher has ended with SIGTERM is recorded. SIGKILL and os._exit leave nothing.
    if found.stack:
        return replace(found, code=-signal.SIGTERM, stopped=True)
    failure = _NO_RECORD | {"message": "ended without an error record", "time": last}
    return replace(found, code=-signal.SIGKILL, failure=failure)
