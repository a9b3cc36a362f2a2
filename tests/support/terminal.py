"""Runs a program on a pseudo-terminal: types keys, and reads what a person would see."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

UP, DOWN, ENTER, CTRL_C, CTRL_D = "\x1b[A", "\x1b[B", "\r", "\x03", "\x04"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>78]|\r")
_ASKS_FOR_CURSOR = "\x1b[6n"


class Terminal:
    """A program whose stdin, stdout and stderr are a terminal, which answers requests for the cursor's position.

    Attributes:
        printed: everything that was printed, with escape codes.
    """

    def __init__(
        self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], columns: int = 100, rows: int = 50
    ) -> None:
        self._main, worker = pty.openpty()
        fcntl.ioctl(worker, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._process = subprocess.Popen(
            argv, cwd=cwd, env={"TERM": "xterm", **env}, stdin=worker, stdout=worker, stderr=worker,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(worker)
        self._seen: list[str] = []
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self.printed = ""
        self._unread = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._main)

    @property
    def text(self) -> str:
        """Everything that was printed, without escape codes."""
        return "".join(self._seen) + self._unread

    def wait(self, text: str, seconds: float = 60) -> str:
        """Wait until a text is printed after the last awaited one, and return what was printed before it."""
        deadline = time.monotonic() + seconds
        while (found := self._unread.find(text)) < 0:
            if not self._read(deadline - time.monotonic()):
                raise AssertionError(f"{text!r} was not printed after:\n{self._unread[-2000:]}")
        before, after = self._unread[:found], found + len(text)
        self._seen.append(self._unread[:after])
        self._unread = self._unread[after:]
        return before

    def wait_for_keys(self, seconds: float = 60) -> None:
        """Wait until the program reads single keys (raw mode). Before that, the terminal would change Enter."""
        deadline = time.monotonic() + seconds
        while termios.tcgetattr(self._main)[3] & termios.ICANON:
            assert time.monotonic() < deadline, "the program reads lines, not keys"
            self._read(0.001)

    def type(self, *keys: str) -> None:
        os.write(self._main, "".join(keys).encode())

    def end(self, seconds: float = 60) -> int:
        """Wait for the end of the program, and return its exit code."""
        deadline = time.monotonic() + seconds
        while self._read(deadline - time.monotonic()):
            pass
        return self._process.wait(max(0.1, deadline - time.monotonic()))

    def _read(self, seconds: float) -> bool:
        """Read what is printed next. Return ``False`` at the end, or if nothing is printed in this time."""
        if seconds <= 0 or not select.select([self._main], [], [], seconds)[0]:
            return False
        try:
            read = os.read(self._main, 1 << 16)
        except OSError:  # the program has ended
            return False
        data = self._decode(read)  # a character may be read in two parts
        self.printed += data
        self._unread = _ESCAPES.sub("", self._unread + data)  # the rest of a code may come later
        for _ in range(data.count(_ASKS_FOR_CURSOR)):
            self.type("\x1b[1;1R")
        return bool(read)
