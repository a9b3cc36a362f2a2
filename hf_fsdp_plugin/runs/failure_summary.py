"""The summary of a failed run: the rank that failed first and its exception, then one line for each other outcome."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_fsdp_plugin.hangs.describe import SILENT_EXIT, describe_comparison, last_call
from hf_fsdp_plugin.hangs.hang_watch import HANG
from hf_fsdp_plugin.hangs.places import RanksAt, format_frames, format_stack, merged
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.runs.exits import RankExit, RunResult
from hf_fsdp_plugin.text import plural, truncate_lines

_CONNECTION_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|lost)|broken pipe|remote process exited|timed? ?out|"
    r"DistNetworkError|DistStoreError|ncclSystemError|ncclRemoteError|ncclInternalError|process group .*abort|"
    r"recvValue|sendBytes|Gloo .*failed",
    re.IGNORECASE,
)
"""Matches messages of exceptions that a rank raises when a peer has exited."""

_HANG = ": hang: "
"""Part of what the launcher of another machine announces when its ranks have ended because of a hang."""
_WAITED = "[FSDP-E670]"
"""Part of the message of a rank that has waited for others in a collective call."""
_HALTED = "did not run, because its process was stopped by SIGSTOP or a debugger"
_MAX_PLACES = 8
_MAX_LINE = 240
_MAX_LINES = 30
_HINTS = {
    "SIGKILL": "Most likely sent by the kernel's out-of-memory killer: use fewer ranks or smaller batches.",
    "SIGSEGV": "A crash in native code.",
    "SIGBUS": "Often caused by a full /dev/shm: give the container more, or use fewer DataLoader workers.",
}


def exit_code(result: RunResult) -> int:
    """Return the launcher's exit code: the code of the first failed rank, or 128 plus the number of its signal."""
    if result.hang is not None or _HANG in (result.remote_failure or ""):
        return HANG
    first = first_failure(result.exits)
    if result.signal_number and not result.exits:
        return 128 + result.signal_number
    if first is None:
        return 1 if result.remote_failure else 0
    if result.signal_number:
        return 128 + result.signal_number
    if result.remote_failure and first.failure is None:
        return 1
    if first.code > 0:
        return first.code
    if first.failure is not None:
        return 1  # the rank recorded an exception before the launcher stopped it
    return 128 - first.code


def first_failure(exits: Iterable[RankExit]) -> RankExit | None:
    """Return the rank whose failure caused the others.

    Ranks that the launcher stopped, and ranks that only lost a connection, come last.
    """
    failed = [rank for rank in exits if rank.code != 0 or rank.failure is not None]
    first = min(failed, key=lambda rank: (only_stopped(rank), has_lost_connection(rank), rank.time), default=None)
    if first is None or first.failure is None:
        return first
    # If several ranks have the same failure, return the lowest rank, because their order in time is random.
    return next(rank for rank in failed if rank.failure is not None and summarize(rank) == summarize(first))


def summarize(rank: RankExit) -> str:
    """Return one line: the exception's message, the exit code, or the name of the signal."""
    failure = rank.failure
    if failure is not None and failure["kind"] in ("exception", "interrupt"):
        return _first_line(failure)
    if failure is not None and failure["kind"] == "spec":
        return "the config has errors"
    message = f": {failure['message']}" if failure is not None and failure["message"] else ""
    return f"killed by {_signal_name(-rank.code)}" if rank.code < 0 else f"exit code {rank.code}{message}"


def format_failures(result: RunResult, *, debug: bool = False, shown_live: Iterable[int] = ()) -> str:
    """Format the whole summary; empty if every rank succeeded.

    Args:
        debug: include the full tracebacks of all ranks.
        shown_live: ranks whose stderr went to the terminal, so that its last lines are not repeated.
    """
    if result.hang is not None:
        return result.hang.text
    first = first_failure(result.exits)
    if result.signal_number and first is not None:
        name = _signal_name(result.signal_number)
        lines = [f"hf-fsdp: stopped by {name}; {_ranks([rank.rank for rank in result.exits])} exited"]
        places = _format_places(result)
        return "\n".join([*lines, *(f"hf-fsdp: {text}" for text in places if len(places) > 1)])
    if result.remote_failure and (first is None or first.failure is None or has_lost_connection(first)):
        return f"hf-fsdp: the ranks of this machine were stopped because another failed: {result.remote_failure}"
    if first is None:
        return ""
    failure = first.failure
    if failure is not None and failure["kind"] == "spec":
        lines = [f"hf-fsdp: {text}" for text in (*_format_places(result), *result.notes)]
        return "\n".join([str(failure["message"]), *(lines if has_waited(first) else ())])
    lines = [f"hf-fsdp: rank {first.rank} failed (pid {first.pid} on {socket.gethostname()}): {summarize(first)}"]
    if failure is not None and failure["kind"] == "exception":
        rest = [f"  {line}" for line in str(failure["message"]).splitlines() if line != _first_line(failure)]
        lines += truncate_lines(rest, _MAX_LINES)
        lines += failure["traceback"].rstrip().splitlines() if debug else format_frames(failure["frames"])
    if first.code < 0 and not first.stopped and (call := last_call(first.calls)):
        lines.append(f"  Its last collective was {call}.")
    if first.code < 0 and not first.stopped and (hint := _HINTS.get(_signal_name(-first.code))):
        lines.append(f"  {hint}")
    if failure is None:
        lines += format_stack(first.stack)
    if (problem := explain(first, result)) is not None:
        lines.append(f"hf-fsdp: {problem}")
    if first.tail and first.rank not in set(shown_live):
        lines += [f"  last lines of rank {first.rank}'s stderr:", *(f"  | {line}" for line in first.tail)]
    lines += _format_others(first, result.exits, debug=debug)
    lines += [f"hf-fsdp: {note}" for note in result.notes]
    return "\n".join(lines)


def explain(first: RankExit, result: RunResult) -> Problem | None:
    """Return why a rank has lost the connection or was aborted; ``None`` if nothing is known but its own error."""
    gone = [rank for rank in result.exits if rank.left_silently]
    if gone and has_lost_connection(first):
        return _silent_exit(gone, result)
    if _may_disagree(first) and (message := _disagreement(result)):
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
    message = f"{_ranks(numbers)} exited {how} before the end of the script{steps}. "
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


def needs_places(result: RunResult) -> bool:
    """Return whether the summary, here or on the machine that failed first, contains where the ranks were."""
    first = first_failure(result.exits)
    if first is None or result.signal_number or result.hang is not None:
        return False
    return bool(result.remote_failure) or _may_disagree(first) or has_waited(first)


def has_waited(first: RankExit) -> bool:
    return first.failure is not None and _WAITED in str(first.failure["message"])


def _may_disagree(first: RankExit) -> bool:
    """Return whether the first failure is one that ranks in different collectives have."""
    return first.code == -signal.SIGABRT or has_lost_connection(first)


def places_of(exits: Iterable[RankExit]) -> list[RanksAt]:
    """Return where ranks were, without the ranks whose place is unknown."""
    known = []
    for rank in exits:
        state = "had ended the script" if rank.ended and rank.failure is None else _HALTED * rank.halted
        if state or rank.place is not None:
            known.append(RanksAt((rank.rank,), state, str(rank.place or "")))
    return merged(known)


def _format_places(result: RunResult) -> list[str]:
    """Return one text for each place at which ranks were, on all machines that are known."""
    places = merged([*places_of(result.exits), *result.elsewhere])
    shown = [str(each) for each in places[:_MAX_PLACES]]
    return [*shown, *([f"and {len(places) - len(shown)} more places"] if len(shown) < len(places) else [])]


def _format_others(first: RankExit, exits: Sequence[RankExit], *, debug: bool) -> list[str]:
    """Return one line for each way in which the other ranks failed, with their numbers."""
    groups: dict[str, list[int]] = {}
    for rank in exits:
        if rank is first or (rank.code == 0 and rank.failure is None):
            continue
        if only_stopped(rank):
            text = "stopped by the launcher"
        elif summarize(rank) == summarize(first):
            text = "failed the same way"
        elif has_lost_connection(rank):
            text = f"lost the connection afterwards: {summarize(rank)}"
        else:
            text = f"failed afterwards: {summarize(rank)}"
        groups.setdefault(text, []).append(rank.rank)
    lines = [f"hf-fsdp: {_ranks(ranks)} {text}" for text, ranks in groups.items()]
    if debug:
        for rank in exits:
            if rank is not first and rank.failure is not None and rank.failure["traceback"]:
                lines += [f"hf-fsdp: traceback of rank {rank.rank}:", rank.failure["traceback"].rstrip()]
    return lines


def _first_line(failure: Mapping[str, Any]) -> str:
    lines = str(failure["message"]).splitlines() or [""]
    # Python prints the location of a syntax error before its message; other exceptions begin with the message.
    line = next((line for line in lines if line.startswith(failure["type"])), lines[0])
    return line if len(line) <= _MAX_LINE else line[: _MAX_LINE - 1] + "…"


def only_stopped(rank: RankExit) -> bool:
    return rank.stopped and rank.failure is None


def has_lost_connection(rank: RankExit) -> bool:
    is_exception = rank.failure is not None and rank.failure["kind"] == "exception"
    return is_exception and bool(_CONNECTION_LOST.search(summarize(rank)))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
