"""Why a run has failed: the summary of the launcher, and what a rank finds out itself under other launchers.

The summary has the rank that failed first and its exception, then one line for each other outcome. A rank that has lost
the connection to others finds the cause in the files of the ranks of its machine (:func:`find_first_cause`).
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from hf_fsdp_plugin.hangs.calls import RankCalls, name_ranks
from hf_fsdp_plugin.hangs.hang_report import SILENT_EXIT, describe_comparison, last_call
from hf_fsdp_plugin.hangs.rank_exit import read_crash, stack_of
from hf_fsdp_plugin.hangs.rank_files import Peer, RankFiles, find_peers
from hf_fsdp_plugin.hangs.rank_stacks import RanksAt, format_stack, merge_places
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.runs.exits import (
    RankExit,
    RunResult,
    first_failure,
    first_line,
    read_exit,
    signal_name,
    summarize_exit,
)
from hf_fsdp_plugin.text import plural, truncate_lines

_MAX_PLACES = 8
_MAX_LINES = 30
_HINTS = {
    "SIGKILL": "Most likely sent by the kernel's out-of-memory killer: use fewer ranks or smaller batches.",
    "SIGSEGV": "A crash in native code.",
    "SIGBUS": "Often caused by a full /dev/shm: give the container more, or use fewer DataLoader workers.",
}


def format_failures(result: RunResult, *, debug: bool = False, shown_live: Iterable[int] = ()) -> str:
    """Format the whole summary; empty if every rank succeeded.

    Args:
        debug: include the full tracebacks of all ranks.
        shown_live: ranks whose stderr went to the terminal, so that its last lines are not repeated.
    """
    if result.hang is not None:
        return result.hang.text
    first = result.first
    if result.signal_number and first is not None:
        name = signal_name(result.signal_number)
        lines = [f"hf-fsdp: stopped by {name}; {name_ranks([rank.rank for rank in result.exits])} exited"]
        places = _format_places(result)
        return "\n".join([*lines, *(f"hf-fsdp: {text}" for text in places if len(places) > 1)])
    if result.remote_failure and (first is None or first.failure is None or first.has_lost_connection):
        return f"hf-fsdp: the ranks of this machine were stopped because another failed: {result.remote_failure}"
    if first is None:
        return ""
    failure = first.failure
    if failure is not None and failure["kind"] == "spec":
        lines = [f"hf-fsdp: {text}" for text in (*_format_places(result), *result.notes)]
        return "\n".join([str(failure["message"]), *(lines if first.has_waited else ())])
    lines = [f"hf-fsdp: rank {first.rank} failed (pid {first.pid} on {socket.gethostname()}): {summarize_exit(first)}"]
    if failure is not None and failure["kind"] == "exception":
        rest = [f"  {line}" for line in str(failure["message"]).splitlines() if line != first_line(failure)]
        lines += truncate_lines(rest, _MAX_LINES)
        lines += failure["traceback"].rstrip().splitlines() if debug else format_stack(stack_of(failure))
    if first.code < 0 and not first.stopped and (call := last_call(first.calls)):
        lines.append(f"  Its last collective was {call}.")
    if first.code < 0 and not first.stopped and (hint := _HINTS.get(signal_name(-first.code))):
        lines.append(f"  {hint}")
    if failure is None:
        lines += format_stack(first.stack)
    if (problem := explain_failure(first, result)) is not None:
        lines.append(f"hf-fsdp: {problem}")
    if first.tail and first.rank not in set(shown_live):
        lines += [f"  last lines of rank {first.rank}'s stderr:", *(f"  | {line}" for line in first.tail)]
    lines += _format_others(first, result.exits, debug=debug)
    lines += [f"hf-fsdp: {note}" for note in result.notes]
    return "\n".join(lines)


def explain_failure(first: RankExit, result: RunResult) -> Problem | None:
    """Return why a rank has lost the connection or was aborted; ``None`` if nothing is known but its own error."""
    gone = [rank for rank in result.exits if rank.left_silently]
    if gone and first.has_lost_connection:
        return _silent_exit(gone, result)
    if first.may_disagree and (message := _disagreement(result)):
        fix = (
            "If these places have different collectives, they do not match. Make every rank run the same collective "
            "calls in the same order: the same number of steps, and saves and evaluations on all ranks."
        )
        return Problem(code="FSDP-E743", message=message, fix=fix)
    return None


def _silent_exit(gone: Sequence[RankExit], result: RunResult) -> Problem:
    """Return the problem of ranks that have exited without an error, so that others lost the connection to them."""
    numbers = [rank.rank for rank in gone]
    steps = f" after {plural(gone[0].counts.steps, 'optimizer step')}" if gone[0].counts is not None else ""
    text = describe_comparison(rank.calls for rank in result.exits if rank.calls is not None)
    how = "with code 0" if gone[0].code_is_known else "without an exception"
    message = f"{name_ranks(numbers)} exited {how} before the end of the script{steps}. "
    if text:
        message += f"{text[0].upper()}{text[1:]}"
    fix = SILENT_EXIT if gone[0].code_is_known else f"{SILENT_EXIT} A signal such as SIGKILL may also have killed it."
    return Problem(code="FSDP-E734", message=message.strip(), fix=fix)


def _disagreement(result: RunResult) -> str:
    """Return sentences on the places of the ranks and on their collectives, as far as these differ."""
    places = _format_places(result)
    compared = describe_comparison(rank.calls for rank in result.exits if rank.calls is not None)
    sentences = [f"the ranks were in different places: {'; '.join(places)}."] if len(places) > 1 else []
    if compared:
        sentences.append(f"{compared[0].upper()}{compared[1:]}" if sentences else compared)
    return " ".join(sentences)


def _format_places(result: RunResult) -> list[str]:
    """Return one text for each place at which ranks were, on all machines that are known."""
    places = merge_places([*result.places, *result.elsewhere])
    shown = [str(each) for each in places[:_MAX_PLACES]]
    return [*shown, *([f"and {len(places) - len(shown)} more places"] if len(shown) < len(places) else [])]


def _format_others(first: RankExit, exits: Sequence[RankExit], *, debug: bool) -> list[str]:
    """Return one line for each way in which the other ranks failed, with their numbers."""
    groups: dict[str, list[int]] = {}
    for rank in exits:
        if rank is first or (rank.code == 0 and rank.failure is None):
            continue
        if rank.only_stopped:
            text = "stopped by the launcher"
        elif summarize_exit(rank) == summarize_exit(first):
            text = "failed the same way"
        elif rank.has_lost_connection:
            text = f"lost the connection afterwards: {summarize_exit(rank)}"
        else:
            text = f"failed afterwards: {summarize_exit(rank)}"
        groups.setdefault(text, []).append(rank.rank)
    lines = [f"hf-fsdp: {name_ranks(ranks)} {text}" for text, ranks in groups.items()]
    if debug:
        for rank in exits:
            if rank is not first and rank.failure is not None and rank.failure["traceback"]:
                lines += [f"hf-fsdp: traceback of rank {rank.rank}:", rank.failure["traceback"].rstrip()]
    return lines


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
    """Return the cause of a lost connection, if other ranks show it; else an empty text, as for other failures.

    Waits for at most two seconds until a rank of this machine has failed for another reason or has exited. Then the
    lowest of its ranks that have lost the connection asks the other machines.

    Args:
        rank, files: rank and files of this process, which has recorded its failure.
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

    A launcher ends the other ranks then. A rank with an exception prints its own error.

    Args:
        files: the files of this process, which is ended.
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
    """Return what is known of how a rank of another machine exited, without the place at which it was."""
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
    """Return where a rank of another machine was. Whether it has exited is left out: the explanation contains that."""
    state = rank.state if rank.state in ("ended", "unreachable") else "running"
    return RanksAt((rank.rank,), rank.place, state, rank.detail)
