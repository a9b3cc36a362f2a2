"""The summary of a failed run: the rank that failed first and its exception, then one line for each other outcome."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

from hf_fsdp_plugin.hangs.hang_report import SILENT_EXIT, describe_comparison, last_call
from hf_fsdp_plugin.hangs.rank_stacks import format_frames, format_stack, merge_places
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.runs.exits import RankExit, RunResult, first_line, signal_name, summarize_exit
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
        lines = [f"hf-fsdp: stopped by {name}; {_ranks([rank.rank for rank in result.exits])} exited"]
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
        lines += failure["traceback"].rstrip().splitlines() if debug else format_frames(failure["frames"])
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
    lines = [f"hf-fsdp: {_ranks(ranks)} {text}" for text, ranks in groups.items()]
    if debug:
        for rank in exits:
            if rank is not first and rank.failure is not None and rank.failure["traceback"]:
                lines += [f"hf-fsdp: traceback of rank {rank.rank}:", rank.failure["traceback"].rstrip()]
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
