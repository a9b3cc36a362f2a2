"""SIGTERM in a rank: a launcher sends it as soon as another rank has exited, and this rank may know why that was.

Where SIGTERM would end the process at once, the process lives a moment longer, and then ends by the same signal. A
handler of the script's own is left alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

_WAKE: Final = b"\n"


class HeldSigterm:
    """Holds SIGTERM for another thread until :meth:`release`, also while the main thread is in native code.

    There, handlers of Python do not run. ``faulthandler`` writes the stack to a pipe, which wakes up the other thread.

    Args:
        stacks: the file to which this stack is added (see ``hangs.places``).
    """

    def __init__(self, stacks: Path) -> None:
        self._stacks = stacks
        self._has_come = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        faulthandler.register(signal.SIGTERM, self._write, all_threads=False, chain=False)

    def wait(self, seconds: float) -> bool:
        """Wait for SIGTERM, or for :meth:`wake`. Returns whether SIGTERM has come."""
        select.select([self._read], [], [], seconds)
        with contextlib.suppress(BlockingIOError):
            text = os.read(self._read, 1 << 16).lstrip(_WAKE)
            if text:
                self._has_come = True
                with contextlib.suppress(OSError), self._stacks.open("ab") as file:
                    file.write(text)
        return self._has_come

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._write, _WAKE)

    def release(self) -> None:
        """End this process by SIGTERM if it has come, and otherwise let the next one end it at once."""
        if _ends_at_once():  # otherwise the script has a handler by now, which has received it
            faulthandler.unregister(signal.SIGTERM)
        has_come = self.wait(0)
        write, self._write = self._write, -1
        os.close(write)
        os.close(self._read)
        if has_come:
            os.kill(os.getpid(), signal.SIGTERM)


def hold_sigterm(stacks: Path) -> HeldSigterm | None:
    """Hold SIGTERM if it would end this process at once; otherwise return ``None``."""
    return HeldSigterm(stacks) if hasattr(faulthandler, "register") and _ends_at_once() else None


def _ends_at_once() -> bool:
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@contextlib.contextmanager
def delayed_sigterm() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGTERM has come, which ends this process only after the block.

    A launcher sends it as soon as another rank has exited: then the cause, which this rank looks for, is there.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread() or not _ends_at_once():
        yield lambda: False
        return
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
