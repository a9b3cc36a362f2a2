"""The ranks of this machine during one attempt: their states, signals and stacks, and how they exited.

Torch's agent starts them (see ``agent``). Here they are looked at without being reaped, so that the launcher decides
when a failed attempt ends: torch stops all ranks as soon as it sees that one has exited.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from hf_fsdp_plugin.hangs.processes import is_halted
from hf_fsdp_plugin.hangs.rank_files import RankFiles
from hf_fsdp_plugin.hangs.rank_stacks import STACK_SIGNAL
from hf_fsdp_plugin.launcher.rank_output import last_lines
from hf_fsdp_plugin.runs.exits import RankExit, read_exit

_STACK_SECONDS = 0.05
"""Seconds that ranks have to record their stacks, which takes milliseconds, before they receive another signal."""
_SETTLE_SECONDS = 2.0
"""Seconds from the first failure to SIGTERM. Ranks that wait for the failed rank often fail in this time."""
_TEARDOWN_SECONDS = 10.0
"""Seconds that a rank has to exit after its exception."""
_TERM_SECONDS = 5.0
"""Seconds from SIGTERM to SIGKILL after a rank has failed."""
_SAVE_SECONDS = 25.0
"""The same while the rank writes a checkpoint in the background, for which its handler of SIGTERM waits 20 seconds."""


@dataclass(kw_only=True)
class RankProcess:
    """A rank of this machine. Its process has its own session.

    Attributes:
        tail: last lines of its stderr, which grow while it runs.
        code: exit code, or minus the number of the signal; ``None`` while it runs.
        stopped: whether the launcher has stopped it.
        halted: whether SIGSTOP or a debugger had stopped it when it was asked for its stack.
    """

    rank: int
    pid: int
    files: RankFiles
    tail: deque[str] = field(default_factory=deque)
    code: int | None = None
    exit_time: float = 0.0
    stopped: bool = False
    halted: bool = False
    _term_sent: float | None = None

    @property
    def is_running(self) -> bool:
        if self.code is None:
            try:
                state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # torch's agent has reaped it while a signal to the launcher was handled
                self.code, self.exit_time = -signal.SIGKILL if self.stopped else 1, time.time()
                return False
            if state is not None:
                exited = state.si_code == os.CLD_EXITED
                self.code, self.exit_time = state.si_status if exited else -state.si_status, time.time()
        return self.code is None

    @property
    def has_failed(self) -> bool:
        return (not self.is_running and self.code != 0) or self.files.failure.exists()

    def send(self, number: int) -> None:
        """Send a signal to the rank only. The rank is responsible for its children."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the rank and its process group."""
        self.stopped |= self.is_running
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def request_stacks(self) -> None:
        """Make the rank record its stacks. Does nothing if it cannot yet, or has recorded where it failed."""
        self.halted = is_halted(self.pid)
        if STACK_SIGNAL is not None and self.files.stacks.exists() and not self.files.failure.exists():
            self.send(STACK_SIGNAL)

    def stop(self, seconds: float) -> None:
        """Send SIGTERM, later SIGKILL, to a rank that still runs `seconds` after a failure."""
        allowed = _TEARDOWN_SECONDS if self.files.failure.exists() else _SETTLE_SECONDS
        if self._term_sent is None and seconds > allowed:
            self._term_sent, self.stopped = seconds, True
            self.send(signal.SIGTERM)
        elif self._term_sent is not None:
            patience = _SAVE_SECONDS if self.files.saving.exists() else _TERM_SECONDS
            if seconds > self._term_sent + patience:
                self.kill()

    def result(self) -> RankExit:
        """Return how the rank exited."""
        return read_exit(
            self.rank,
            self.files,
            code=self.code or 0,
            time=self.exit_time or time.time(),
            pid=self.pid,
            stopped=self.stopped,
            tail=tuple(last_lines(self.tail)),
            halted=self.halted,
        )


class Ranks(list[RankProcess]):
    """The ranks of this machine."""

    def running(self) -> list[RankProcess]:
        return [rank for rank in self if rank.is_running]

    def request_stacks(self) -> None:
        """Make the running ranks record where they are, before they are stopped."""
        running = self.running()
        for rank in running:
            rank.request_stacks()
        if running:
            time.sleep(_STACK_SECONDS)

    def send(self, number: int) -> None:
        for rank in self.running():
            rank.send(number)

    def kill(self) -> None:
        for rank in self:
            rank.kill()

    def stop(self, seconds: float, *, now: bool = False) -> None:
        """Stop the ranks that still run `seconds` after a failure; `now` gives them no time to fail themselves."""
        for rank in self.running():
            rank.stop(seconds + (_TEARDOWN_SECONDS if now else 0.0))
