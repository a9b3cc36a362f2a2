"""Forwards the output of ranks to the terminal and to log files, and keeps the last lines of their stderr."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from hf_fsdp_plugin.problems import Problem

NUM_TAIL_LINES = 15
_READ_BYTES = 65536
_JOIN_SECONDS = 1.0


class RankOutput:
    """The output of the ranks of this machine.

    The output of the first rank is shown, or that of all ranks, or none. The pipe of a rank is read to its end,
    whatever happens to the terminal and to the log: a rank whose pipe is full would wait without end.

    Attributes:
        reader_exited: whether the process that reads this process's stdout or stderr (head, less) has exited.
    """

    def __init__(
        self,
        *,
        show_all: bool,
        show_first: bool = True,
        log_dir: Path | None,
        append_logs: bool = False,
        notice: Callable[[object], None],
    ) -> None:
        """``append_logs`` keeps what the log files contain: the output of earlier attempts."""
        self._append_logs = append_logs
        self._show_all = show_all
        self._show_first = show_first
        self._log_dir = log_dir
        self._notice = notice
        self._print_lock = threading.Lock()
        self._readers: list[threading.Thread] = []
        self.reader_exited = False

    def streams(self, *, is_first: bool) -> tuple[int | None, int | None]:
        """Return ``stdout`` and ``stderr`` of a rank for ``Popen``. The first rank may write to the terminal."""
        if is_first and self._show_first and not self._show_all and self._log_dir is None:
            return None, None
        is_captured = self._show_all or self._log_dir is not None
        return subprocess.PIPE if is_captured else subprocess.DEVNULL, subprocess.PIPE

    def forward(self, rank: int, process: subprocess.Popen[bytes], *, is_first: bool) -> deque[str]:
        """Start to read the pipes of a rank. Returns the last lines of its stderr, which grow while it runs."""
        tail: deque[str] = deque(maxlen=4 * NUM_TAIL_LINES)
        log = None
        if self._log_dir is not None:
            log = _Log(self._log_dir / f"rank_{rank}.log", self._notice, append=self._append_logs)
        is_shown = self._show_all or (is_first and self._show_first)
        prefix = f"[rank {rank}] " if self._show_all else ""
        for pipe, stream, lines in ((process.stdout, sys.stdout, None), (process.stderr, sys.stderr, tail)):
            if pipe is not None:
                arguments = (pipe, stream if is_shown else None, prefix, lines, log)
                self._readers.append(threading.Thread(target=self._read, args=arguments, daemon=True))
                self._readers[-1].start()
        return tail

    def finish(self) -> None:
        """Read what the ranks have written until they exited. A process that a rank has left may keep a pipe open."""
        for reader in self._readers:
            reader.join(_JOIN_SECONDS)

    def _read(self, pipe: IO[bytes], stream: Any, prefix: str, tail: deque[str] | None, log: _Log | None) -> None:
        read: Callable[[], bytes] = (
            pipe.readline if prefix else lambda: pipe.read1(_READ_BYTES)  # type: ignore[attr-defined]
        )
        rest = b""
        for block in iter(read, b""):
            if log is not None:
                log.write(block)
            if stream is not None and not self.reader_exited:
                self._show(stream, prefix.encode() + block)
            if tail is not None:
                *lines, rest = (rest + block).split(b"\n")
                rest = rest[-4096:]
                tail.extend(line.decode(errors="replace") for line in lines)
        if tail is not None and rest:
            tail.append(rest.decode(errors="replace"))

    def _show(self, stream: Any, text: bytes) -> None:
        with self._print_lock:
            try:
                stream.buffer.write(text)
                stream.buffer.flush()
            except BrokenPipeError:
                self.reader_exited = True
                discard(stream)
            except OSError:  # for example a full disk: the output is lost, the run goes on
                discard(stream)


class _Log:
    """A log file. After a failed write, a warning is printed and nothing more is written."""

    def __init__(self, path: Path, notice: Callable[[object], None], *, append: bool) -> None:
        self._path, self._notice = path, notice
        self._file: IO[bytes] | None = None
        self._lock = threading.Lock()
        try:
            self._file = path.open("ab" if append else "wb", buffering=0)
        except OSError as error:
            self._stop(error)

    def write(self, block: bytes) -> None:
        with self._lock:
            try:
                while self._file is not None and block:
                    block = block[self._file.write(block) :]
            except OSError as error:
                self._stop(error)

    def _stop(self, error: OSError) -> None:
        self._file = None
        message = f"{self._path} is incomplete: {error.strerror or error}."
        fix = "Free disk space, or pass another folder as --log_dir. The run goes on without this log."
        with contextlib.suppress(OSError):  # stderr may be on the same full disk
            self._notice(Problem(code="FSDP-W745", message=message, fix=fix))


def discard(stream: Any) -> None:
    """Discard everything that is written to ``stream`` from now on, also what it has buffered."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def last_lines(tail: Sequence[str]) -> list[str]:
    """Return the last non-empty lines. For each progress bar, only its last state is returned."""
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in tail]
    return [line for line in lines if line][-NUM_TAIL_LINES:]
