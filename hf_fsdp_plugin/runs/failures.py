"""How the ranks of a machine exited, which failed first, and why: for the summary, restarts and other machines.

:func:`tell_failure` makes the text from what the files of the ranks show (:func:`read_exit`). ``hf-fsdp launch`` prints
the rank that failed first and its exception, then one line for each other outcome. Under other launchers, a rank that
has lost the connection to others adds the cause to its own error (:func:`find_first_cause`).
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hf_fsdp_plugin.hangs import HANG, process_end, python_stacks, watch_files
from hf_fsdp_plugin.hangs.calls import Counts, RankCalls, read_calls
from hf_fsdp_plugin.hangs.hang_cause import SILENT_EXIT, compare_calls
from hf_fsdp_plugin.hangs.python_stacks import Frame
from hf_fsdp_plugin.hangs.watch_files import RankFiles, find_peers
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
        halted: whether SIGSTOP or a debugger had stopped its process when it was asked for its stack.
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
    halted: bool = False
    calls: RankCalls | None = None
    code_is_known: bool = True

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
        is_exception = self.failure is not None and self.failure["kind"] == "exception"
        return is_exception and _CONNECTION_LOST.search(summarize_exit(self)) is not None

    @property
    def has_waited(self) -> bool:
        """Whether it failed because other ranks did not make a collective call."""
        return self.failure is not None and _WAITED in self.failure.get("codes", ())

    @property
    def may_disagree(self) -> bool:
        """Whether its failure is one that ranks in different collectives have."""
        return self.code == -signal.SIGABRT or self.has_lost_connection

    @property
    def counts(self) -> Counts | None:
        """Its optimizer steps and forwards; ``None`` if they were not counted."""
        return self.calls.counts if self.calls is not None else None

    @property
    def place(self) -> str:
        """Where it was at the failure; empty if that is unknown."""
        return python_stacks.find_place(self.stack, self.counts)[1]


def read_exit(rank: int, files: RankFiles, *, code: int, time: float, **facts: Any) -> RankExit:
    """Return how a rank exited, from its files and what the caller knows.

    Args:
        code, time: code and time of its exit.
        facts: further fields of :class:`RankExit`.
    """
    failure = watch_files.read_json(files.failure)
    found = RankExit(
        rank=rank,
        code=code,
        time=failure["time"] if failure is not None else time,
        failure=failure,
        stack=tuple(process_end.stack_of(failure)),
        calls=read_calls(rank, files.calls),
        ended=files.ended.exists(),
        **facts,
    )
    if failure is None and (code or not found.code_is_known):
        return replace(found, stack=tuple(python_stacks.read_stack(files.stacks)))
    return found


@dataclass(kw_only=True, slots=True)
class AttemptResult:
    """How the ranks of this machine exited.

    Attributes:
        signal_number: the signal that stopped the launcher, or 0.
        remote_failure: the failure of a rank on another machine, if any.
        has_remote_hang: whether this failure is a hang.
        elsewhere: where the ranks of other machines were, after the machines have shared that.
        notes: what is not known of other machines.
        hang: why the run was ended, if ranks waited for too long.
        joins: whether the attempt was ended because a machine joins the run.
        first: the rank whose failure caused the others, determined from ``exits``; ``None`` if none has failed.
    """

    exits: tuple[RankExit, ...]
    signal_number: int = 0
    remote_failure: str | None = None
    has_remote_hang: bool = False
    elsewhere: Sequence[RankCalls] = ()
    notes: Sequence[str] = ()
    hang: watch_files.FoundHang | None = None
    joins: bool = False
    first: RankExit | None = field(init=False)

    def __post_init__(self) -> None:
        self.first = first_failure(self.exits)

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
    def needs_places(self) -> bool:
        """Whether the summary, here or on the machine that failed first, contains where the ranks were."""
        first = self.first
        if first is None or self.signal_number or self.hang is not None:
            return False
        return bool(self.remote_failure) or first.may_disagree or first.has_waited

    @property
    def places(self) -> list[RankCalls]:
        """Where the ranks of this machine were, without the ranks whose place is unknown."""
        known = []
        for rank in self.exits:
            state = "ended" if rank.ended and rank.failure is None else "halted" if rank.halted else "running"
            if state != "running" or rank.place:
                known.append(RankCalls(rank=rank.rank, place=rank.place, state=state))
        return known


def first_failure(exits: Iterable[RankExit]) -> RankExit | None:
    """Return the rank whose failure caused the others; ``None`` if none has failed.

    Ranks that the launcher stopped, and ranks that only lost a connection, come last.
    """
    failed = [rank for rank in exits if rank.code != 0 or rank.failure is not None]
    first = min(failed, key=lambda rank: (rank.only_stopped, rank.has_lost_connection, rank.time), default=None)
    if first is None or first.failure is None:
        return first
    # If several ranks have the same failure, return the lowest rank, because their order in time is random.
    summary = summarize_exit(first)
    return next(rank for rank in failed if rank.failure is not None and summarize_exit(rank) == summary)


def summarize_exit(rank: RankExit) -> str:
    """Return one line: the exception's message, the exit code, or the name of the signal."""
    failure = rank.failure
    if failure is not None and failure["kind"] in ("exception", "interrupt"):
        return first_line(failure)
    if failure is not None and failure["kind"] == "spec":
        return spec_failure(failure)
    message = f": {failure['message']}" if failure is not None and failure["message"] else ""
    return f"killed by {signal_name(-rank.code)}" if rank.code < 0 else f"exit code {rank.code}{message}"


def spec_failure(failure: Mapping[str, Any]) -> str:
    """Return what a ``SpecError`` is: the config has errors, or the code and message of the first error of the run."""
    codes = [code for code in failure.get("codes", ()) if code[len("FSDP-")] == "E"]
    if all(code.startswith(_OF_CONFIG) for code in codes):
        return "the config has errors"
    return f"{codes[0]}: {first_line(failure)}"


def first_line(failure: Mapping[str, Any]) -> str:
    """Return the line of an exception's message that names it."""
    lines = str(failure["message"]).splitlines() or [""]
    # Python prints the location of a syntax error before its message; other exceptions begin with the message.
    line = next((line for line in lines if line.startswith(failure["type"])), lines[0])
    return line if len(line) <= _MAX_LINE else line[: _MAX_LINE - 1] + "…"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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
    first = result.first
    if result.hang is not None:
        return result.hang.text
    if result.signal_number and first is not None:
        name = signal_name(result.signal_number)
        places = _format_places(result)
        stopped = f"stopped by {name}; {name_ranks([rank.rank for rank in result.exits])} exited"
        return _block([stopped, *(places if len(places) > 1 else ())])
    if result.remote_failure and (first is None or first.failure is None or first.has_lost_connection):
        return _block([f"the ranks of this machine were stopped because another failed: {result.remote_failure}"])
    if first is None:
        return ""
    problem = explain_failure(first, result)
    if brief and first.has_lost_connection:
        return str(problem or "")
    if brief:
        place, more = f" {first.place}" if first.place else "", f". {_capitalized(str(problem))}" if problem else ""
        return f"rank {first.rank} failed first{place}: {summarize_exit(first)}{more}"
    if first.failure is not None and first.failure["kind"] == "spec":
        places = [*_format_places(result), *result.notes] if first.has_waited else []
        return "\n".join([str(first.failure["message"]), *filter(None, [_block(places)])])
    tail = [f"  | {line}" for line in first.tail] if first.rank not in set(shown_live) else []
    return "\n".join(
        [
            _block([f"rank {first.rank} failed (pid {first.pid} on {socket.gethostname()}): {summarize_exit(first)}"]),
            *_format_own(first, debug=debug),
            *([_block([problem])] if problem is not None else ()),
            *([f"  last lines of rank {first.rank}'s stderr:", *tail] if tail else ()),
            *_format_others(first, result.exits, debug=debug),
            *([_block(result.notes)] if result.notes else ()),
        ]
    )


def _block(lines: Iterable[object]) -> str:
    return "\n".join(f"hf-fsdp: {line}" for line in lines)


def _format_own(first: RankExit, *, debug: bool) -> list[str]:
    """Return the rest of the message of an exception, what is known of a signal, and the stack."""
    failure, lines = first.failure, []
    is_exception = failure is not None and failure["kind"] == "exception"
    if failure is not None and is_exception:
        rest = [f"  {line}" for line in str(failure["message"]).splitlines() if line != first_line(failure)]
        lines += truncate_lines(rest, _MAX_LINES)
    if first.code < 0 and not first.stopped:
        if first.calls is not None and first.calls.last_call:
            lines.append(f"  Its last collective was {first.calls.last_call}.")
        if hint := _HINTS.get(signal_name(-first.code)):
            lines.append(f"  {hint}")
    if failure is None:
        lines += python_stacks.format_stack(first.stack)
    elif is_exception:
        traceback = failure["traceback"].rstrip().splitlines()
        lines += traceback if debug else python_stacks.format_stack(process_end.stack_of(failure))
    return lines


def explain_failure(first: RankExit, result: AttemptResult) -> Problem | None:
    """Return why a rank has lost the connection or was aborted; ``None`` if nothing is known but its own error."""
    if not first.may_disagree:
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
    places = _format_places(result)
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


def _format_places(result: AttemptResult) -> list[str]:
    """Return one text for each place at which ranks were, on all machines that are known."""
    return python_stacks.shown_places([*result.places, *result.elsewhere])


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
_STACK_SECONDS: Final = 0.05
"""Seconds that another rank has to record its stack."""


AskOthers = Callable[[Sequence[RankCalls]], Sequence[RankCalls]]
"""Takes what is known of the ranks of this machine. Returns what is known of the ranks of other machines."""


def find_first_cause(
    rank: int, files: RankFiles, ask_others: AskOthers, is_told_to_end: Callable[[], bool] = lambda: False
) -> str:
    """Return the cause of a lost connection, if other ranks show it; else an empty text, as for other failures.

    Waits for at most two seconds until a rank of this machine has failed for another reason or has exited. Then the
    lowest of its ranks that have lost the connection asks the other machines.

    Args:
        rank, files: rank and files of this process, which has recorded its failure.
        is_told_to_end: whether the launcher ends this process: then half a second is left, and nobody is asked.
    """
    deadline = time.monotonic() + _SECONDS
    while True:
        exits = exits_of_machine(files)
        own = next((each for each in exits if each.rank == rank), None)
        first = first_failure(exits)
        if own is None or first is None or not own.has_lost_connection or files.hang.exists():
            return ""
        others = [each for each in exits if each is not own]
        is_known = any(each.left_silently for each in others) or all(each.failure is not None for each in others)
        if is_known or not first.has_lost_connection or time.monotonic() > deadline:
            break
        if is_told_to_end():
            deadline = min(deadline, time.monotonic() + _HURRY_SECONDS)
        time.sleep(_POLL_SECONDS)
    elsewhere: Sequence[RankCalls] = ()
    is_answered = any(each.left_silently or (each.failure is not None and each.rank < rank) for each in others)
    if not is_answered and not is_told_to_end():
        elsewhere = ask_others([each.calls for each in exits if each.calls is not None])
    return tell_failure(_result_of(exits, elsewhere), brief=True)


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
        crash = process_end.read_crash(peer.files.stacks) if is_gone and not has_failed else 0
        if not has_failed and not is_gone and peer.pid != os.getpid():
            peer.request_stacks()
            time.sleep(_STACK_SECONDS)
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
