"""How the ranks of a machine exited, and which failed first: for the summary, restarts and other machines."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hf_fsdp_plugin.hangs.call_record import Counts, read_calls, read_counts
from hf_fsdp_plugin.hangs.calls import RankCalls
from hf_fsdp_plugin.hangs.hang_report import FoundHang
from hf_fsdp_plugin.hangs.rank_exit import read_failure, stack_of
from hf_fsdp_plugin.hangs.rank_files import HANG, RankFiles
from hf_fsdp_plugin.hangs.rank_stacks import Frame, RankPlace, RanksAt, find_place, merge_places, read_stack

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
        failure: what the rank recorded (see ``hangs.rank_exit``); None if it recorded nothing.
        tail: last lines of its stderr; empty if stderr went to the terminal.
        stack: its stack at the failure, outermost frame first; empty if that is unknown.
        counts: its optimizer steps and forwards; ``None`` if they were not counted.
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
    counts: Counts | None = None
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
    def place(self) -> RankPlace | None:
        """Where it was at the failure; ``None`` if that is unknown."""
        return find_place(self.stack, self.counts)


def read_exit(rank: int, files: RankFiles, *, code: int, time: float, **facts: Any) -> RankExit:
    """Return how a rank exited, from its files and what the caller knows.

    Args:
        code, time: code and time of its exit.
        facts: further fields of :class:`RankExit`.
    """
    counts, calls, failure = read_counts(files.steps), read_calls(rank, files.calls), read_failure(files.failure)
    if counts is not None:
        calls = replace(calls, steps=counts.steps, forwards=counts.forwards)
    found = RankExit(
        rank=rank,
        code=code,
        time=failure["time"] if failure is not None else time,
        failure=failure,
        stack=tuple(stack_of(failure)),
        counts=counts,
        calls=calls,
        ended=files.ended.exists(),
        **facts,
    )
    if failure is None and (code or not found.code_is_known):
        return replace(found, stack=tuple(read_stack(files.stacks)))
    return found


@dataclass(kw_only=True, slots=True)
class RunResult:
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
    elsewhere: Sequence[RanksAt] = ()
    notes: Sequence[str] = ()
    hang: FoundHang | None = None
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
    def places(self) -> list[RanksAt]:
        """Where the ranks of this machine were, without the ranks whose place is unknown."""
        known = []
        for rank in self.exits:
            state = "ended" if rank.ended and rank.failure is None else "halted" if rank.halted else "running"
            if state != "running" or rank.place is not None:
                known.append(RanksAt((rank.rank,), str(rank.place or ""), state))
        return merge_places(known)


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
        return "the config has errors"
    message = f": {failure['message']}" if failure is not None and failure["message"] else ""
    return f"killed by {signal_name(-rank.code)}" if rank.code < 0 else f"exit code {rank.code}{message}"


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
