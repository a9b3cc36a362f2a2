"""How the ranks of a machine exited, which failed first, and why: for the summary, restarts and other machines.

:func:`read_exit` reads from the files of a rank how it exited; only a launcher knows its exit code, too.
:func:`tell_failure` makes the text of a failure under every launcher. ``hf-fsdp launch`` prints the rank that failed
first and its exception, then one line for each other outcome. Under other launchers, a rank that has lost the
connection to others adds the cause to its own error (:func:`find_first_cause`).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.hangs import HANG, python_stacks
from hf_fsdp_plugin.hangs.calls import Counts, RankCalls, read_calls
from hf_fsdp_plugin.hangs.hang_cause import compare_calls
from hf_fsdp_plugin.hangs.hang_texts import SILENT_EXIT, shown_places
from hf_fsdp_plugin.hangs.process_end import stack_of
from hf_fsdp_plugin.hangs.python_stacks import Frame
from hf_fsdp_plugin.hangs.watch_files import FoundHang, RankFiles, find_peers, read_json
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import name_ranks, plural, truncate_lines

_CONNECTION_LOST: Final = re.compile(
    r"connection (was )?(closed|reset|refused|lost)|broken pipe|remote process exited|timed? ?out|"
    r"DistNetworkError|DistStoreError|ncclSystemError|ncclRemoteError|ncclInternalError|process group .*abort|"
    r"recvValue|sendBytes|Gloo .*failed",
    re.IGNORECASE,
)
"""Matches messages of exceptions that a rank raises when a peer has exited."""
_WAITED: Final = "FSDP-E670"
"""Code of the problem that a rank raises after it has waited for others in a collective call."""
_MAX_LINE: Final = 240


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExit:
    """How a rank exited.

    Attributes:
        code: exit code, or minus the number of the signal.
        stopped: whether the launcher stopped it.
        time: time of its exception or, if it recorded none, of its exit, in seconds since the epoch.
        failure: what the rank recorded (see ``hangs.process_end``); None if it recorded nothing.
        tail: last lines of its stderr; empty if stderr went to the terminal.
        stack: its stack at the failure, outermost frame first; empty if that is unknown.
        ended: whether its script had ended without an error.
        calls: its collectives; ``None`` if they are unknown.
        code_is_known: whether ``code`` is known. Only the launcher knows it; other ranks set ``code`` to 0.
    """

    rank: int
    code: int
    time: float
    pid: int = 0
    stopped: bool = False
    failure: Mapping[str, Any] | None = None
    tail: tuple[str, ...] = ()
    stack: tuple[Frame, ...] = ()
    ended: bool = False
    calls: RankCalls | None = None
    code_is_known: bool = True

    @property
    def kind(self) -> str:
        """The kind of its recorded failure; empty without one."""
        return self.failure["kind"] if self.failure is not None else ""

    @property
    def has_failed(self) -> bool:
        return self.code != 0 or self.failure is not None

    @property
    def left_silently(self) -> bool:
        """Whether it exited before the end of its script, without an error and without the launcher."""
        return self.code == 0 and self.failure is None and not self.ended and not self.stopped

    @property
    def only_stopped(self) -> bool:
        """Whether the launcher stopped it before it had failed by itself."""
        return self.stopped and self.failure is None

    @property
    def has_lost_connection(self) -> bool:
        """Whether it failed because it has lost the connection to another rank."""
        return self.kind == "exception" and _CONNECTION_LOST.search(summarize_exit(self)) is not None

    @property
    def has_waited(self) -> bool:
        """Whether it failed because other ranks did not make a collective call."""
        return self.failure is not None and _WAITED in self.failure.get("codes", ())

    @property
    def counts(self) -> Counts | None:
        """Its optimizer steps and forwards; ``None`` if they were not counted."""
        return self.calls.counts if self.calls is not None else None

    @property
    def place(self) -> str:
        """Where it was at the failure; empty if that is unknown."""
        return python_stacks.find_place(self.stack, self.counts)[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptResult:
    """How the ranks of this machine exited.

    Attributes:
        signal_number: the signal that stopped the launcher, or 0.
        remote_failure: the failure of a rank on another machine, if any.
        has_remote_hang: whether this failure is a hang.
        hang: why the run was ended, if ranks waited for too long.
    """

    exits: tuple[RankExit, ...]
    signal_number: int = 0
    remote_failure: str | None = None
    has_remote_hang: bool = False
    hang: FoundHang | None = None

    @property
    def first(self) -> RankExit | None:
        """The rank whose failure caused the others; ``None`` if none has failed."""
        return first_failure(self.exits)

    @property
    def exit_code(self) -> int:
        """The launcher's exit code: the code of the first failed rank, or 128 plus the number of its signal."""
        if self.hang is not None or self.has_remote_hang:
            return HANG
        first = self.first
        if self.signal_number and (first is not None or not self.exits):
            return 128 + self.signal_number
        if first is None or (self.remote_failure and first.failure is None):
            return 1 if self.remote_failure else 0
        if first.code > 0:
            return first.code
        # A rank that recorded an exception may have been stopped by the launcher afterwards.
        return 1 if first.failure is not None else 128 - first.code

    @property
    def places(self) -> list[RankCalls]:
        """Where the ranks of this machine were, without the ranks whose place is unknown."""
        known = []
        for rank in self.exits:
            state = "ended" if rank.ended and rank.failure is None else "running"
            if state != "running" or rank.place:
                known.append(RankCalls(rank=rank.rank, place=rank.place, state=state))
        return known


def first_failure(exits: Iterable[RankExit]) -> RankExit | None:
    """Return the rank whose failure caused the others; ``None`` if none has failed.

    Ranks that the launcher stopped, and ranks that only lost a connection, come last.
    """
    failed = [rank for rank in exits if rank.has_failed]
    first = min(failed, key=lambda rank: (rank.only_stopped, rank.has_lost_connection, rank.time), default=None)
    if first is None or first.failure is None:
        return first
    # If several ranks have the same failure, return the lowest rank, because their order in time is random.
    summary = summarize_exit(first)
    return next(rank for rank in failed if rank.failure is not None and summarize_exit(rank) == summary)


def summarize_exit(rank: RankExit) -> str:
    """Return one line: the exception's message, the exit code, or the name of the signal."""
    failure = rank.failure or {"message": ""}
    if rank.kind in ("exception", "interrupt"):
        return first_line(failure)
    if rank.kind == "spec":
        codes = [code for code in failure.get("codes", ()) if code[len("FSDP-")] == "E"]
        is_of_config = all(code.startswith(_OF_CONFIG) for code in codes)
        return "the config has errors" if is_of_config else f"{codes[0]}: {first_line(failure)}"
    message = f": {failure['message']}" if failure["message"] else ""
    if rank.code < 0:
        return f"killed by {signal_name(-rank.code)}"
    return f"exit code {rank.code or failure.get('code', 0)}{message}"


def first_line(failure: Mapping[str, Any]) -> str:
    """Return the line of an exception's message that names it."""
    lines = str(failure["message"]).splitlines() or [""]
    # Python prints the location of a syntax error before its message; other exceptions begin with the message.
    line = next((line for line in lines if line.startswith(failure["type"])), lines[0])
    return line if len(line) <= _MAX_LINE else line[: _MAX_LINE - 1] + "…"


def signal_name(number: int) -> str:
    """Return ``SIGKILL``; ``signal 40`` for a real-time signal, which has no name."""
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")


_OF_CONFIG = ("FSDP-E0", "FSDP-E1", "FSDP-E2")
"""Codes of errors that the sources, the spec or the plan have: no rank has begun to train."""
_MAX_LINES = 30
_HINTS = {
    "SIGKILL": "Most likely sent by the kernel's out-of-memory killer: use fewer ranks or smaller batches.",
    "SIGSEGV": "A crash in native code.",
    "SIGBUS": "Often caused by a full /dev/shm: give the container more, or use fewer DataLoader workers.",
}


def tell_failure(
    result: AttemptResult, *, brief: bool = False, debug: bool = False, shown_live: Iterable[int] = ()
) -> str:
    """Return what users read of a failure, under every launcher; empty if every rank succeeded.

    Args:
        brief: for a rank that prints it itself, beside its own exception: one line, without the stack and the other
            ranks. A lost connection is what this rank has, so only its cause is included.
        debug: include the full tracebacks of all ranks.
        shown_live: ranks whose stderr went to the terminal, so that its last lines are not repeated.
    """
    first, places = result.first, shown_places(result.places)
    if result.hang is not None:
        return result.hang.text
    if result.signal_number and first is not None:
        ranks = name_ranks([rank.rank for rank in result.exits])
        stopped = f"stopped by {signal_name(result.signal_number)}; {ranks} exited"
        return _block([stopped, *(places if len(places) > 1 else ())])
    if result.remote_failure and (first is None or first.failure is None or first.has_lost_connection):
        why = f"the ranks of this machine were stopped because another failed: {result.remote_failure}"
        return _block([why, *places])
    if first is None:
        return ""
    if brief:
        return "; ".join(places) if first.has_waited else _tell_briefly(first, result)
    if first.failure is not None and first.kind == "spec":  # its message is for users
        return "\n".join([str(first.failure["message"]), *([_block(places)] if first.has_waited else ())])
    lines = _describe_first(first, debug=debug)
    if problem := explain_failure(first, result):
        lines.append(_block([problem]))
    if first.tail and first.rank not in shown_live:
        lines += [f"  last lines of rank {first.rank}'s stderr:", *(f"  | {line}" for line in first.tail)]
    return "\n".join([*lines, *_describe_others(first, result, debug=debug)])


def _tell_briefly(first: RankExit, result: AttemptResult) -> str:
    problem = explain_failure(first, result)
    if first.has_lost_connection:
        return str(problem or "")
    place, more = f" {first.place}" if first.place else "", f". {_capitalized(str(problem))}" if problem else ""
    return f"rank {first.rank} failed first{place}: {summarize_exit(first)}{more}"


def _block(lines: Iterable[object]) -> str:
    return "\n".join(f"hf-fsdp: {line}" for line in lines)


def _describe_first(first: RankExit, *, debug: bool) -> list[str]:
    """Return the lines on the rank that has failed first: its exception or signal, and its stack."""
    lines = [_block([f"rank {first.rank} failed (pid {first.pid} on {socket.gethostname()}): {summarize_exit(first)}"])]
    if first.failure is not None and first.kind == "exception":
        rest = [line for line in str(first.failure["message"]).splitlines() if line != first_line(first.failure)]
        lines += truncate_lines([f"  {line}" for line in rest], _MAX_LINES)
    if first.code < 0 and not first.stopped:
        if first.calls is not None and first.calls.last_call:
            lines.append(f"  Its last collective was {first.calls.last_call}.")
        if hint := _HINTS.get(signal_name(-first.code)):
            lines.append(f"  {hint}")
    if first.failure is not None and first.kind == "exception" and debug:
        return [*lines, first.failure["traceback"].rstrip()]
    return lines + (python_stacks.format_stack(first.stack) if first.kind in ("", "exception") else [])


def _describe_others(first: RankExit, result: AttemptResult, *, debug: bool) -> list[str]:
    """Return one line for each way in which the other ranks failed, with their numbers."""
    groups: dict[str, list[int]] = {}
    others = [rank for rank in result.exits if rank is not first]
    for rank in [rank for rank in others if rank.has_failed]:
        text = f"failed afterwards: {summarize_exit(rank)}"
        if rank.only_stopped:
            text = "stopped by the launcher"
        elif summarize_exit(rank) == summarize_exit(first):
            text = "failed the same way"
        elif rank.has_lost_connection:
            text = f"lost the connection afterwards: {summarize_exit(rank)}"
        groups.setdefault(text, []).append(rank.rank)
    lines = [_block([f"{name_ranks(ranks)} {text}"]) for text, ranks in groups.items()]
    for rank in others if debug else ():
        if rank.failure is not None and rank.failure["traceback"]:
            lines.append(f"hf-fsdp: traceback of rank {rank.rank}:\n{rank.failure['traceback'].rstrip()}")
    return lines


def explain_failure(first: RankExit, result: AttemptResult) -> Problem | None:
    """Return why a rank has lost the connection or was aborted; ``None`` if nothing is known but its own error."""
    if first.code != -signal.SIGABRT and not first.has_lost_connection:
        return None
    compared = compare_calls(rank.calls for rank in result.exits if rank.calls is not None)
    gone = [rank for rank in result.exits if rank.left_silently]
    if gone and first.has_lost_connection:
        steps = f" after {plural(gone[0].counts.steps, 'optimizer step')}" if gone[0].counts is not None else ""
        how, fix = "with code 0", SILENT_EXIT
        if not gone[0].code_is_known:
            how, fix = "without an exception", f"{fix} A signal such as SIGKILL may also have killed it."
        text = f"{name_ranks([rank.rank for rank in gone])} exited {how} before the end of the script{steps}. "
        return Problem(code="FSDP-E734", message=f"{text}{_capitalized(compared)}".strip(), fix=fix)
    places = shown_places(result.places)
    if len(places) > 1:
        compared = f"the ranks were in different places: {'; '.join(places)}. {_capitalized(compared)}".strip()
    if not compared:
        return None
    fix = (
        "If these places have different collectives, they do not match. Make every rank run the same collective "
        "calls in the same order: the same number of steps, and saves and evaluations on all ranks."
    )
    return Problem(code="FSDP-E743", message=compared, fix=fix)


def _capitalized(sentences: str) -> str:
    return f"{sentences[:1].upper()}{sentences[1:]}"


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
        return replace(found, stack=tuple(python_stacks.read_stack(files.stacks)))
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
