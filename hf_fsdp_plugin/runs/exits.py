"""How the ranks of a machine exited: what the launcher knows of each, for the summary, restarts and other machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_fsdp_plugin.hangs.call_files import read_calls
from hf_fsdp_plugin.hangs.calls import RankCalls
from hf_fsdp_plugin.hangs.failures import read_failure
from hf_fsdp_plugin.hangs.hang_report import FoundHang
from hf_fsdp_plugin.hangs.places import Frame, Place, RanksAt, find_place
from hf_fsdp_plugin.hangs.rank_files import RankFiles
from hf_fsdp_plugin.hangs.step_count import Counts, read_counts


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExit:
    """How a rank exited.

    Attributes:
        code: exit code, or minus the number of the signal.
        stopped: whether the launcher stopped it.
        time: time of its exception or, if it recorded none, of its exit, in seconds since the epoch.
        failure: what the rank recorded (see ``hangs.failures``); None if it recorded nothing.
        tail: last lines of its stderr; empty if stderr went to the terminal.
        stack: its stack at the failure, outermost frame first; empty if that is unknown.
        counts: its optimizer steps and forwards; ``None`` if they were not counted.
        ended: whether its script had ended without an error.
        halted: whether SIGSTOP or a debugger had stopped its process when it was asked for its stack.
        calls: its collectives; ``None`` if they are unknown.
        code_is_known: whether it is, to the launcher. Another rank, which takes it to be 0, does not know it.
    """

    rank: int
    pid: int
    code: int
    stopped: bool
    time: float
    failure: Mapping[str, Any] | None
    tail: tuple[str, ...]
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
    def place(self) -> Place | None:
        """Where it was at the failure; ``None`` if that is unknown."""
        return find_place(self.stack, self.counts)


def read_record(rank: int, files: RankFiles) -> dict[str, Any]:
    """Return the fields of :class:`RankExit` that are in the files of a rank."""
    counts, calls = read_counts(files.steps), read_calls(rank, files.calls)
    if counts is not None:
        calls = replace(calls, steps=counts.steps, forwards=counts.forwards)
    failure, ended = read_failure(files.failure), files.ended.exists()
    return {"rank": rank, "failure": failure, "counts": counts, "calls": calls, "ended": ended}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How the ranks of this machine exited.

    Attributes:
        signal_number: the signal that stopped the launcher, or 0.
        remote_failure: the failure of a rank on another machine, if any.
        elsewhere: where the ranks of other machines were.
        notes: what is not known of other machines.
        hang: why the run was ended, if ranks waited for too long.
        joins: whether the attempt was ended because a machine joins the run.
    """

    exits: tuple[RankExit, ...]
    signal_number: int = 0
    remote_failure: str | None = None
    elsewhere: tuple[RanksAt, ...] = ()
    notes: tuple[str, ...] = ()
    hang: FoundHang | None = None
    joins: bool = False
