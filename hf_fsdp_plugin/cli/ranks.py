"""Starts, watches and stops the ranks of one machine as processes. No rank outlives the launcher.

This replaces torch's elastic agent, which restarts ranks with a changing world size and reports little more than the
exit code of a failed rank. Training that resumes from checkpoints does not need restarts. Here each rank has its own
session, so that it receives a signal once and its children exit with it, and the launcher can report which rank failed
first and why.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from hf_fsdp_plugin.cli.rendezvous import Peers

NUM_TAIL_LINES = 15
_POLL_SECONDS = 0.05
_SETTLE_SECONDS = 2.0
"""Seconds from the first failure to SIGTERM. Ranks that wait for the failed rank often fail in this time."""
_TEARDOWN_SECONDS = 10.0
"""Seconds that a rank has to exit after its exception."""
_TERM_SECONDS = 5.0
"""Seconds from SIGTERM to SIGKILL after a rank has failed."""
_FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_STOPPING = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))


@dataclass(frozen=True, kw_only=True, slots=True)
class RankExit:
    """How a rank exited.

    Attributes:
        code: exit code, or minus the number of the signal.
        stopped: whether the launcher stopped it.
        time: time of its exception or, if it recorded none, of its exit, in seconds since the epoch.
        failure: what the rank recorded (see ``run_script``); None if it recorded nothing.
        tail: last lines of its stderr; empty if stderr went to the terminal.
    """

    rank: int
    pid: int
    code: int
    stopped: bool
    time: float
    failure: Mapping[str, Any] | None
    tail: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """How the ranks of this machine exited.

    Attributes:
        signal_number: the signal that stopped the launcher, or 0.
        remote_failure: the failure of a rank on another machine, if any.
    """

    exits: tuple[RankExit, ...]
    signal_number: int = 0
    remote_failure: str | None = None


@dataclass(kw_only=True)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    failure_file: Path
    tail: deque[str]
    readers: list[threading.Thread] = field(default_factory=list)
    exit_time: float | None = None
    stopped: bool = False
    term_sent: float | None = None

    def poll(self) -> int | None:
        code = self.process.poll()
        if code is not None and self.exit_time is None:
            self.exit_time = time.time()
        return code

    @property
    def has_failed(self) -> bool:
        return (self.poll() or 0) != 0 or self.failure_file.exists()

    def send(self, number: int) -> None:
        """Send a signal to the rank only. The rank is responsible for its children."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def result(self) -> RankExit:
        try:
            failure: Mapping[str, Any] | None = json.loads(self.failure_file.read_text())
        except (OSError, ValueError):
            failure = None
        return RankExit(
            rank=self.rank,
            pid=self.process.pid,
            code=self.process.returncode,
            stopped=self.stopped,
            time=failure["time"] if failure is not None else self.exit_time or time.time(),
            failure=failure,
            tail=tuple(_last_lines(self.tail)),
        )


class Ranks:
    """The ranks of this machine."""

    def __init__(self, *, show_all: bool, log_dir: Path | None, scratch: Path) -> None:
        self._show_all = show_all
        self._log_dir = log_dir
        self._scratch = scratch
        self._ranks: list[_Rank] = []
        self._signal = 0
        self._kill_at = float("inf")
        self._print_lock = threading.Lock()

    def start(self, rank: int, command: Sequence[str], env: Mapping[str, str], *, failure_variable: str) -> None:
        """Start one rank. The first rank writes to the terminal. For other ranks, the last lines of stderr are kept."""
        failure_file = self._scratch / f"rank_{rank}.json"
        is_first = not self._ranks
        is_live = is_first and not self._show_all and self._log_dir is None
        is_captured = self._show_all or self._log_dir is not None
        process = subprocess.Popen(
            command,
            env={**env, failure_variable: str(failure_file)},
            stdin=None if is_first else subprocess.DEVNULL,
            stdout=None if is_live else subprocess.PIPE if is_captured else subprocess.DEVNULL,
            stderr=None if is_live else subprocess.PIPE,
            start_new_session=True,
        )
        started = _Rank(rank=rank, process=process, failure_file=failure_file, tail=deque(maxlen=4 * NUM_TAIL_LINES))
        self._ranks.append(started)
        log = (self._log_dir / f"rank_{rank}.log").open("wb", buffering=0) if self._log_dir is not None else None
        is_shown = self._show_all or is_first
        prefix = f"[rank {rank}] " if self._show_all else ""
        for pipe, stream, tail in ((process.stdout, sys.stdout, None), (process.stderr, sys.stderr, started.tail)):
            if pipe is not None:
                arguments = (pipe, stream if is_shown else None, prefix, tail, log)
                started.readers.append(threading.Thread(target=self._forward_output, args=arguments, daemon=True))
                started.readers[-1].start()

    def watch(self, *, grace: float, peers: Peers) -> RunResult:
        """Wait for the ranks and forward signals. If a rank fails, here or on another machine, stop all.

        Args:
            grace: seconds ranks have to exit after SIGINT or SIGTERM.
        """
        remote_failure: str | None = None
        failed_at: float | None = None
        with self._forwarded_signals(grace):
            while self._running():
                now = time.monotonic()
                if failed_at is None and not self._signal:
                    remote_failure = peers.failure()
                    if remote_failure or any(rank.has_failed for rank in self._ranks):
                        failed_at = now
                if failed_at is not None:
                    self._stop_after_failure(now - failed_at)
                if now > self._kill_at:
                    for rank in self._running():
                        rank.stopped = True
                        rank.kill_group()
                time.sleep(_POLL_SECONDS)
            if failed_at is not None or self._signal or any(rank.has_failed for rank in self._ranks):
                for rank in self._ranks:
                    rank.kill_group()
        for rank in self._ranks:
            for reader in rank.readers:
                reader.join(1.0)  # a grandchild may keep the pipe open
        exits = tuple(rank.result() for rank in self._ranks)
        return RunResult(exits=exits, signal_number=self._signal, remote_failure=remote_failure)

    def kill(self) -> None:
        """Kill every rank that is still running."""
        for rank in self._running():
            rank.kill_group()
            rank.process.wait()

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.poll() is None]

    def _stop_after_failure(self, seconds: float) -> None:
        """Send SIGTERM, later SIGKILL, to the ranks that still run `seconds` after the failure."""
        for rank in self._running():
            allowed = _TEARDOWN_SECONDS if rank.failure_file.exists() else _SETTLE_SECONDS
            if rank.term_sent is None and seconds > allowed:
                rank.term_sent = seconds
                rank.stopped = True
                rank.send(signal.SIGTERM)
            elif rank.term_sent is not None and seconds > rank.term_sent + _TERM_SECONDS:
                rank.kill_group()

    @contextlib.contextmanager
    def _forwarded_signals(self, grace: float) -> Iterator[None]:
        def forward(number: int, frame: Any) -> None:
            del frame
            if number in _STOPPING:
                is_second = self._signal in _STOPPING
                self._signal = number
                self._kill_at = min(self._kill_at, time.monotonic() + (0.0 if is_second else grace))
            for rank in self._running():
                rank.send(number)

        previous = {}
        for name in _FORWARDED:
            number = getattr(signal, name, None)
            # nohup and background shells ignore some signals. Ignored signals stay ignored here and in ranks.
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, forward)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _forward_output(
        self, pipe: IO[bytes], stream: Any, prefix: str, tail: deque[str] | None, log: IO[bytes] | None
    ) -> None:
        read: Callable[[], bytes] = pipe.readline if prefix else lambda: pipe.read1(65536)  # type: ignore[attr-defined]
        rest = b""
        for block in iter(read, b""):
            if log is not None:
                log.write(block)
            if stream is not None:
                with self._print_lock:
                    stream.buffer.write(prefix.encode() + block)
                    stream.buffer.flush()
            if tail is not None:
                *lines, rest = (rest + block).split(b"\n")
                rest = rest[-4096:]
                tail.extend(line.decode(errors="replace") for line in lines)
        if tail is not None and rest:
            tail.append(rest.decode(errors="replace"))


def _last_lines(tail: Sequence[str]) -> list[str]:
    """Return the last non-empty lines. For each progress bar, only its last state is returned."""
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in tail]
    return [line for line in lines if line][-NUM_TAIL_LINES:]
