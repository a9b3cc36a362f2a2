"""The processes of the ranks of this machine: their states, and their output.

Torch's agent starts them (see ``torch_private.elastic``; the steps are in ``start_ranks.run_once``). Here their states
are read without reaping them, so that the launcher decides when a failed attempt ends: torch stops all ranks as soon as
it sees that one has exited.

Torch's agent redirects the streams of a rank to files. These are named pipes here: a full disk or a terminal that is
closed then stops a log, and not the rank.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.hangs.python_stacks import request_stack
from hf_fsdp_plugin.hangs.watch_files import RankFiles, is_halted
from hf_fsdp_plugin.launcher.rank_environment import RankJob
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.runs.exits import read_exit
from hf_fsdp_plugin.runs.failures import RankExit


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
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the rank and its process group."""
        self.stopped |= self.is_running
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def request_stacks(self) -> None:
        """Make the rank record its stacks. Does nothing if it cannot yet, or has recorded where it failed."""
        self.halted = is_halted(self.pid)
        if not self.files.failure.exists():
            request_stack(self.files.stacks, self.pid)

    def stop(self, seconds: float, *, now: bool = False) -> None:
        """Send SIGTERM, later SIGKILL, to a rank that still runs `seconds` after a failure.

        Args:
            now: give it no time to fail by itself.
        """
        seconds += time_limits.TEARDOWN if now else 0.0
        allowed = time_limits.TEARDOWN if self.files.failure.exists() else time_limits.SETTLE
        if self._term_sent is None and seconds > allowed:
            self._term_sent, self.stopped = seconds, True
            self.send(signal.SIGTERM)
        elif self._term_sent is not None:
            patience = time_limits.SAVE if self.files.saving.exists() else time_limits.TERM
            if seconds > self._term_sent + patience:
                self.kill()

    def result(self) -> RankExit:
        """Return how the rank exited."""
        known = {"pid": self.pid, "stopped": self.stopped, "halted": self.halted, "tail": _last_lines(self.tail)}
        return read_exit(self.rank, self.files, code=self.code or 0, time=self.exit_time or time.time(), **known)


_NUM_TAIL_LINES = 15
_READ_BYTES = 65536
_MAX_LINE = 4096


class RankOutput:
    """The output of the ranks of this machine.

    The output of the first rank is shown, or that of all ranks, or none. The pipe of a rank is read to its end,
    whatever happens to the terminal and to the log: a rank whose pipe is full would wait without end.

    Args:
        scratch: temporary folder for the pipes.

    Attributes:
        reader_exited: whether the process that reads this process's stdout or stderr (head, less) has exited.
    """

    def __init__(self, job: RankJob, scratch: Path) -> None:
        self._job, self._scratch = job, scratch
        self._print_lock, self._log_lock = threading.Lock(), threading.Lock()
        self._logs: dict[int, IO[bytes]] = {}
        self._readers: list[threading.Thread] = []
        self._has_ended = threading.Event()
        self.reader_exited = False

    def open(self, rank: int, *, is_first: bool, appends: bool = False) -> tuple[str, str, deque[str]]:
        """Prepare the streams of a rank, before it is started.

        Args:
            appends: whether the log file contains the output of earlier attempts, which is kept.

        Returns:
            The files to which its stdout and stderr go, empty for those of the launcher, and the last lines of its
            stderr, which grow while it runs.
        """
        tail: deque[str] = deque(maxlen=4 * _NUM_TAIL_LINES)
        job = self._job
        is_shown = job.show_all or (is_first and job.show_first)
        if is_shown and not job.show_all and job.log_dir is None:
            return "", "", tail
        if job.log_dir is not None:
            with self._log_of(rank) as path:
                self._logs[rank] = path.open("ab" if appends else "wb", buffering=0)
        prefix = f"[rank {rank}] ".encode() if job.show_all else b""
        paths = []
        for stream, lines in ((sys.stdout, None), (sys.stderr, tail)):
            if not is_shown and job.log_dir is None and lines is None:
                paths.append(os.devnull)
                continue
            path = self._scratch / f"rank_{rank}.{'stdout' if lines is None else 'stderr'}"
            os.mkfifo(path, 0o600)
            # For reading and writing, so that opening waits for nobody and the pipe does not end between two writers.
            pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
            arguments = (pipe, stream if is_shown else None, prefix, lines, rank)
            self._readers.append(threading.Thread(target=self._read, args=arguments, daemon=True))
            self._readers[-1].start()
            paths.append(str(path))
        return paths[0], paths[1], tail

    def finish(self) -> None:
        """Read the rest of the output of the ranks, which have exited, and end the threads that read."""
        self._has_ended.set()
        for reader in self._readers:
            reader.join()

    def _read(self, pipe: int, stream: Any, prefix: bytes, tail: deque[str] | None, rank: int) -> None:
        rest, block = b"", b"\n"
        while block:
            block = self._next_block(pipe)
            # The last line may end without a newline.
            *lines, rest = (rest + (block or b"\n" * bool(rest))).split(b"\n")
            self._write_log(rank, block)
            if tail is not None:
                tail.extend(line.decode(errors="replace") for line in lines)
            if prefix:
                block_shown = b"".join(prefix + line + b"\n" for line in lines)
            else:
                block_shown, rest = block, rest[-_MAX_LINE:]
            self._show(stream, block_shown)
        os.close(pipe)

    def _write_log(self, rank: int, block: bytes) -> None:
        with self._log_lock, self._log_of(rank):
            while block and rank in self._logs:
                block = block[self._logs[rank].write(block) :]

    @contextlib.contextmanager
    def _log_of(self, rank: int) -> Iterator[Path]:
        """Yield the path of a rank's log. After an error, a warning is printed and nothing more is written to it."""
        path = (self._job.log_dir or Path()) / f"rank_{rank}.log"
        try:
            yield path
        except OSError as error:
            self._logs.pop(rank, None)
            message = f"{path} is incomplete: {error.strerror or error}."
            fix = "Free disk space, or pass another folder as --log_dir. The run goes on without this log."
            with contextlib.suppress(OSError):  # stderr may be on the same full disk
                self._job.notice(Problem(code="FSDP-W745", message=message, fix=fix))

    def _next_block(self, pipe: int) -> bytes:
        """Return the next bytes of a rank's output; empty if the rank has exited and all is read."""
        while not select.select([pipe], [], [], 0 if self._has_ended.is_set() else time_limits.OUTPUT)[0]:
            if self._has_ended.is_set():
                return b""
        return os.read(pipe, _READ_BYTES)

    def _show(self, stream: Any, text: bytes) -> None:
        if stream is None or self.reader_exited or not text:
            return
        with self._print_lock:
            try:
                stream.buffer.write(text)
                stream.buffer.flush()
            except BrokenPipeError:
                self.reader_exited = True
                _discard(stream)
            except OSError:  # for example a full disk: the output is lost, the run goes on
                _discard(stream)


def _discard(stream: Any) -> None:
    """Discard everything that is written to ``stream`` from now on, also what it has buffered."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _last_lines(tail: deque[str]) -> tuple[str, ...]:
    """Return the last non-empty lines. For each progress bar, only its last state is returned."""
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in tail]
    return tuple(line for line in lines if line)[-_NUM_TAIL_LINES:]
