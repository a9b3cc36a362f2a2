"""Why a rank has lost the connection to others, from the files of the ranks of its machine: under every launcher."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from hf_fsdp_plugin.hangs.calls import RankCalls
from hf_fsdp_plugin.hangs.processes import Peer, find_peers
from hf_fsdp_plugin.hangs.rank_exit import read_crash
from hf_fsdp_plugin.hangs.rank_files import RankFiles
from hf_fsdp_plugin.hangs.rank_stacks import RanksAt
from hf_fsdp_plugin.runs.exits import RankExit, RunResult, first_failure, read_exit, summarize_exit
from hf_fsdp_plugin.runs.failure_summary import explain_failure

_SECONDS: Final = 2.0
"""Seconds that the ranks of the machine have to record their failures."""
_HURRY_SECONDS: Final = 0.5
_POLL_SECONDS: Final = 0.1


def find_first_cause(
    rank: int,
    files: RankFiles,
    ask_others: Callable[[Sequence[RankCalls]], Sequence[RankCalls]],
    is_told_to_end: Callable[[], bool] = lambda: False,
) -> str:
    """Return what other ranks show of the cause of a lost connection; empty if that is nothing, or for another failure.

    Waits for at most two seconds until one of this machine has failed otherwise or has exited. Then the lowest of its
    ranks that have lost the connection asks the other machines.

    Args:
        rank, files: of this process, which has recorded its failure.
        ask_others: returns what is known of the ranks of other machines.
        is_told_to_end: whether the launcher ends this process: then half a second is left, and nobody is asked.
    """
    exits: Sequence[RankExit] = ()
    deadline = time.monotonic() + _SECONDS
    while True:
        exits = [exit_of(peer) for peer in find_peers(files.stem.parent)]
        own = next((each for each in exits if each.rank == rank), None)
        if own is None or not own.has_lost_connection or files.hang.exists():
            return ""
        first = first_failure(exits)
        is_known = first is not None and not first.has_lost_connection
        others = [each for each in exits if each is not own]
        is_known |= any(each.left_silently for each in others) or all(each.failure is not None for each in others)
        if is_known or time.monotonic() > deadline:
            break
        if is_told_to_end():
            deadline = min(deadline, time.monotonic() + _HURRY_SECONDS)
        time.sleep(_POLL_SECONDS)
    elsewhere: Sequence[RankCalls] = ()
    is_answered = any(each.left_silently or (each.failure is not None and each.rank < rank) for each in others)
    if not is_answered and not is_told_to_end():
        elsewhere = ask_others([each.calls for each in exits if each.calls is not None])
    result = RunResult(exits=(*exits, *map(_exit_elsewhere, elsewhere)), elsewhere=_places_elsewhere(elsewhere))
    if first is None or first.has_lost_connection:
        return str(explain_failure(first or own, result) or "")
    return _first_failed(first, result)


def cause_of_end(files: RankFiles) -> str:
    """Return which rank of this machine native code has aborted, and why; empty if none has recorded a crash.

    A launcher ends the other ranks then. A rank with an exception says itself what has happened.

    Args:
        files: of this process, which is ended.
    """
    result = RunResult(exits=tuple(exit_of(peer) for peer in find_peers(files.stem.parent)))
    first = result.first
    return _first_failed(first, result) if first is not None and first.code < 0 else ""


def cause_of_abort(
    rank: int, files: RankFiles, ask_others: Callable[[Sequence[RankCalls]], Sequence[RankCalls]]
) -> str:
    """Return where native code aborts this rank, which is alone on its machine, and what other machines know of it."""
    exits = [exit_of(peer) for peer in find_peers(files.stem.parent) if peer.rank == rank]
    if not exits:
        return ""
    own = replace(exits[0], code=-signal.SIGABRT, code_is_known=True, stopped=False)
    elsewhere = ask_others([own.calls] if own.calls is not None else [])
    result = RunResult(exits=(own, *map(_exit_elsewhere, elsewhere)), elsewhere=_places_elsewhere(elsewhere))
    return _first_failed(own, result)


def _first_failed(first: RankExit, result: RunResult) -> str:
    place = f" {first.place}" if first.place is not None else ""
    text = str(explain_failure(first, result) or "")
    more = f". {text[0].upper()}{text[1:]}" if text else ""
    return f"rank {first.rank} failed first{place}: {summarize_exit(first)}{more}"


def exit_of(peer: Peer) -> RankExit:
    """Return what another rank can know of how a rank exited, or that it runs."""
    is_gone, has_failed = peer.is_gone(), peer.files.failure.exists()
    crash = read_crash(peer.files.stacks) if is_gone and not has_failed else 0
    if not has_failed and not is_gone and peer.pid != os.getpid():
        peer.request_stacks()
        time.sleep(0.05)
    facts = {"pid": peer.pid, "code_is_known": bool(crash), "stopped": not is_gone}
    return read_exit(peer.rank, peer.files, code=-crash, time=time.time(), **facts)


def _exit_elsewhere(rank: RankCalls) -> RankExit:
    """Return the same of a rank of another machine. Its place is not in it."""
    return RankExit(
        rank=rank.rank,
        code=0,
        code_is_known=False,
        stopped=rank.state != "exited",
        time=time.time(),
        calls=rank if rank.state != "unreachable" else None,
    )


def _places_elsewhere(ranks: Sequence[RankCalls]) -> list[RanksAt]:
    return [place for each in ranks if (place := _place_elsewhere(each)).place or place.state != "running"]


def _place_elsewhere(rank: RankCalls) -> RanksAt:
    """Return where a rank of another machine was. That it had exited is a part of the explanation itself."""
    state = rank.state if rank.state in ("ended", "unreachable") else "running"
    return RanksAt((rank.rank,), rank.place, state, rank.detail)
