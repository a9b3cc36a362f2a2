"""The processes of the ranks of this machine: their states, and their output.

Torch's agent starts them (see ``torch_private.elastic``; the steps are in ``start_ranks.run_once``). Here their states
are read without reaping them, so that the launcher decides when a failed attempt ends: torch stops all ranks as soon as
it sees that one has exited.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.hangs.python_stacks import request_stack
from hf_fsdp_plugin.hangs.watch_files import RankFiles
from hf_fsdp_plugin.launcher.rank_environment import RankJob
from hf_fsdp_plugin.runs.exits import read_exit
from hf_fsdp_plugin.runs.failures import RankExit


@dataclass(kw_only=True)
class RankProcess:
    """A rank of this machine. Its process has its own session.

    Attributes:
        stderr: the file of its stderr; ``None`` if that is shown only.
        code: exit code, or minus the number of the signal; ``None`` while it runs.
        stopped: whether the launcher has stopped it.
    """

    rank: int
    pid: int
    files: RankFiles
    stderr: Path | None = None
    code: int | None = None
    exit_time: float = 0.0
    stopped: bool = False
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
        known = {"pid": self.pid, "stopped": self.stopped, "tail": _last_lines(self.stderr)}
        return read_exit(self.rank, self.files, code=self.code or 0, time=self.exit_time or time.time(), **known)


_NUM_TAIL_LINES = 15
_TAIL_BYTES = 65536


class RankOutput:
    """The output of the ranks of this machine, which torch's agent redirects to files.

    The output of the first rank is shown, or that of all ranks, or none. Without a log, a rank that is shown alone
    writes to the streams of the launcher itself.

    Args:
        scratch: temporary folder for the files, if there is no folder of logs.

    Attributes:
        reader_exited: whether the process that reads this process's stdout or stderr (head, less) has exited.
    """

    def __init__(self, job: RankJob, scratch: Path) -> None:
        self._job, self._folder = job, job.log_dir or scratch
        self._readers: list[threading.Thread] = []
        self._has_ended = threading.Event()
        self.reader_exited = False

    def open(self, rank: int, *, is_first: bool, attempt: int = 0) -> tuple[str, str]:
        """Return the files of the stdout and stderr of a rank, before it is started; empty for those of the launcher.

        Args:
            attempt: number of the attempt; the files of earlier attempts are kept.
        """
        job = self._job
        is_shown = job.show_all or (is_first and job.show_first)
        if is_shown and not job.show_all and job.log_dir is None:
            return "", ""
        name = f"rank_{rank}" + (f".attempt_{attempt}" if attempt else "")
        paths = [self._folder / f"{name}.{stream}.log" for stream in ("stdout", "stderr")]
        if not is_shown and job.log_dir is None:
            paths[0] = Path(os.devnull)
        prefix = f"[rank {rank}] ".encode() if job.show_all else b""
        for path, stream in zip(paths, (sys.stdout, sys.stderr), strict=True) if is_shown else ():
            path.write_bytes(b"")
            self._readers.append(threading.Thread(target=self._show, args=(path, stream, prefix), daemon=True))
            self._readers[-1].start()
        return str(paths[0]), str(paths[1])

    def finish(self) -> None:
        """Show the rest of the output of the ranks, which have exited."""
        self._has_ended.set()
        for reader in self._readers:
            reader.join()

    def _show(self, path: Path, stream: Any, prefix: bytes) -> None:
        """Show what is written to a file, until the ranks have exited; with a prefix, only whole lines."""
        with path.open("rb") as file:
            rest, has_ended = b"", False
            while not has_ended and not self.reader_exited:
                has_ended = self._has_ended.wait(time_limits.OUTPUT)
                text = rest + file.read()
                if prefix:
                    text += b"\n" * (has_ended and bool(text) and not text.endswith(b"\n"))
                    *lines, rest = text.split(b"\n")
                    text = b"".join(prefix + line + b"\n" for line in lines)
                try:
                    stream.buffer.write(text)
                    stream.buffer.flush()
                except OSError:  # the reader has exited, or a disk is full
                    self.reader_exited = True
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, stream.fileno())  # discards what the stream has buffered
                    os.close(null)


def _last_lines(path: Path | None) -> tuple[str, ...]:
    """Return the last non-empty lines of a file. For each progress bar, only its last state is returned."""
    if path is None or not path.is_file():
        return ()
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return tuple(line for line in lines if line)[-_NUM_TAIL_LINES:]
