"""How the ranks of a machine exited, from their files: for the launcher, and for ranks without one.

Only a launcher knows exit codes. Under other launchers, a rank that has lost the connection to others looks for the
cause (:func:`find_first_cause`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.hangs.calls import read_calls
from hf_fsdp_plugin.hangs.process_end import stack_of
from hf_fsdp_plugin.hangs.python_stacks import read_stack
from hf_fsdp_plugin.hangs.watch_files import RankFiles, find_peers, read_json
from hf_fsdp_plugin.runs.failures import AttemptResult, RankExit, first_failure, tell_failure


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


def find_first_cause(rank: int, files: RankFiles) -> str:
    """Return the cause of a lost connection, or the places of ranks that did not make a call; else an empty text.

    Only ranks of this machine are known.

    Waits for at most two seconds until one of them has failed for another reason or has exited.

    Args:
        rank, files: rank and files of this process, which has recorded its failure.
    """
    deadline = time.monotonic() + time_limits.CAUSE
    exits = exits_of_machine(files)
    while _is_unknown(rank, exits) and not files.hang.exists() and time.monotonic() < deadline:
        time.sleep(time_limits.POLL)
        exits = exits_of_machine(files)
    is_of_others = any(each.rank == rank and (each.has_lost_connection or each.has_waited) for each in exits)
    if files.hang.exists() or not is_of_others:
        return ""
    return tell_failure(AttemptResult(exits=tuple(exits)), brief=True)


def _is_unknown(rank: int, exits: Sequence[RankExit]) -> bool:
    """Return whether the ranks of this machine have only lost connections, and none of them shows why."""
    first, others = first_failure(exits), [each for each in exits if each.rank != rank]
    if first is None or not first.has_lost_connection:
        return False
    return not any(each.left_silently for each in others) and any(each.failure is None for each in others)


def exits_of_machine(files: RankFiles) -> list[RankExit]:
    """Return what a rank can know of how the ranks of its machine exited, or that they run."""
    found = []
    for peer in find_peers(files.stem.parent):
        is_gone = peer.is_gone()
        if not is_gone and peer.pid != os.getpid() and not peer.files.failure.exists():
            peer.request_stacks()
            time.sleep(time_limits.ONE_STACK)
        facts = {"pid": peer.pid, "code_is_known": False, "stopped": not is_gone}
        found.append(read_exit(peer.rank, peer.files, code=0, time=time.time(), **facts))
    return found
