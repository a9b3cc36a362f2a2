"""Forwards the output of ranks to the terminal and to log files, and keeps the last lines of their stderr.

Torch's agent redirects the streams of a rank to files. These are named pipes here: a full disk or a terminal that is
closed then stops a log, and not the rank.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from hf_fsdp_plugin.problems import Problem

NUM_TAIL_LINES = 15
_READ_BYTES = 65536
_MAX_LINE = 4096
_WAIT_SECONDS = 0.2


class RankOutput:
    """The output of the ranks of this machine.

    The output of the first rank is shown, or that of all ranks, or none. The pipe of a rank is read to its end,
    whatever happens to the terminal and to the log: a rank whose pipe is full would wait without end.

    Args:
        scratch: temporary folder for the pipes.
        append_logs: whether the log files contain the output of earlier attempts, which is kept.
        notice: prints a message for the user.

    Attributes:
        reader_exited: whether the process that reads this process's stdout or stderr (head, less) has exited.
    """

    def __init__(
        self,
        *,
        show_all: bool,
        show_first: bool = True,
        log_dir: Path | None,
        scratch: Path,
        append_logs: bool = False,
        notice: Callable[[object], None],
    ) -> None:
        self._append_logs = append_logs
        self._show_all, self._show_first = show_all, show_first
        self._log_dir, self._scratch = log_dir, scratch
        self._notice = notice
        self._print_lock = threading.Lock()
        self._readers: list[threading.Thread] = []
        self._has_ended = threading.Event()
        self.reader_exited = False

    def open(self, rank: int, *, is_first: bool) -> tuple[str, str, deque[str]]:
        """Prepare the streams of a rank, before it is started.

        Returns:
            The files to which its stdout and stderr go, empty for those of the launcher, and the last lines of its
            stderr, which grow while it runs.
        """
        tail: deque[str] = deque(maxlen=4 * NUM_TAIL_LINES)
        is_shown = self._show_all or (is_first and self._show_first)
        if is_shown and not self._show_all and self._log_dir is None:
            return "", "", tail
        log = None
        if self._log_dir is not None:
            log = _Log(self._log_dir / f"rank_{rank}.log", self._notice, append=self._append_logs)
        prefix = f"[rank {rank}] " if self._show_all else ""
        paths = []
        for stream, lines in ((sys.stdout, None), (sys.stderr, tail)):
            if not is_shown and log is None and lines is None:
                paths.append(os.devnull)
                continue
            path = self._scratch / f"rank_{rank}.{'stdout' if lines is None else 'stderr'}"
            os.mkfifo(path, 0o600)
            # For reading and writing, so that opening waits for nobody and the pipe does not end between two writers.
            pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
            arguments = (pipe, stream if is_shown else None, prefix, lines, log)
            self._readers.append(threading.Thread(target=self._read, args=arguments, daemon=True))
            self._readers[-1].start()
            paths.append(str(path))
        return paths[0], paths[1], tail

    def finish(self) -> None:
        """Read what the ranks have written until they exited, and end."""
        self._has_ended.set()
        for reader in self._readers:
            reader.join()

    def _read(self, pipe: int, stream: Any, prefix: str, tail: deque[str] | None, log: _Log | None) -> None:
        rest = b""
        while block := self._next_block(pipe):
            if log is not None:
                log.write(block)
            if tail is None and not prefix:
                self._show(stream, block)
                continue
            *lines, rest = (rest + block).split(b"\n")
            if prefix:
                self._show(stream, b"".join(prefix.encode() + line + b"\n" for line in lines))
            else:
                self._show(stream, block)
                rest = rest[-_MAX_LINE:]
            if tail is not None:
                tail.extend(line.decode(errors="replace") for line in lines)
        if rest:
            if prefix:
                self._show(stream, prefix.encode() + rest + b"\n")
            if tail is not None:
                tail.append(rest.decode(errors="replace"))
        os.close(pipe)

    def _next_block(self, pipe: int) -> bytes:
        """Return what a rank has written next; empty if it has exited and all is read."""
        while not select.select([pipe], [], [], 0 if self._has_ended.is_set() else _WAIT_SECONDS)[0]:
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
