"""One rank of this machine as a process: its state, its signals, and how it exited."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_fsdp_plugin.hangs.call_files import read_calls
from hf_fsdp_plugin.hangs.places import STACK_SIGNAL, Frame, read_stack
from hf_fsdp_plugin.hangs.processes import is_halted
from hf_fsdp_plugin.hangs.rank_files import RankFiles
from hf_fsdp_plugin.hangs.step_count import read_counts
from hf_fsdp_plugin.launcher.rank_output import last_lines
from hf_fsdp_plugin.runs.exits import RankExit

TERM_SECONDS = 5.0
"""Seconds from SIGTERM to SIGKILL after a rank has failed."""
_SAVE_SECONDS = 25.0
"""The same while the rank writes a checkpoint in the background, for which its handler of SIGTERM waits 20 seconds."""


@dataclass(kw_only=True)
class RankProcess:
    """A rank that the launcher has started, as a process with its own session."""

    rank: int
    process: subprocess.Popen[bytes]
    files: RankFiles
    tail: deque[str]
    exit_time: float | None = None
    stopped: bool = False
    halted: bool = False
    term_sent: float | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is not None and self.exit_time is None:
            self.exit_time = time.time()
        return code

    @property
    def has_failed(self) -> bool:
        return (self.poll() or 0) != 0 or self.files.failure.exists()

    @property
    def seconds_after_term(self) -> float:
        return _SAVE_SECONDS if self.files.saving.exists() else TERM_SECONDS

    def send(self, number: int) -> None:
        """Send a signal to the rank only. The rank is responsible for its children."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def request_stacks(self) -> None:
        """Make the rank record its stacks. Does nothing if it cannot yet, or has recorded where it failed."""
        self.halted = is_halted(self.process.pid)
        if STACK_SIGNAL is not None and self.files.stacks.exists() and not self.files.failure.exists():
            self.send(STACK_SIGNAL)

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def result(self) -> RankExit:
        try:
            failure: Mapping[str, Any] | None = json.loads(self.files.failure.read_text())
        except (OSError, ValueError):
            failure = None
        counts, calls = read_counts(self.files.steps), read_calls(self.rank, self.files.calls)
        if counts is not None:
            calls = replace(calls, steps=counts.steps, forwards=counts.forwards)
        return RankExit(
            rank=self.rank,
            pid=self.process.pid,
            code=self.process.returncode,
            stopped=self.stopped,
            time=failure["time"] if failure is not None else self.exit_time or time.time(),
            failure=failure,
            tail=tuple(last_lines(self.tail)),
            stack=tuple(self._stack(failure)),
            counts=counts,
            ended=self.files.ended.exists(),
            halted=self.halted,
            calls=calls,
        )

    def _stack(self, failure: Mapping[str, Any] | None) -> Sequence[Frame]:
        if failure is not None:
            return [Frame(frame["file"], frame["line"], frame["name"]) for frame in failure["frames"]]
        return read_stack(self.files.stacks) if self.process.returncode != 0 else ()
