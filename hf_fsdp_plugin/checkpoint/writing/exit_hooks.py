"""Hooks on optimizer steps, interpreter exit and SIGTERM that are installed while a save is in flight."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_fsdp_plugin.checkpoint.writing.save import Save

_MANY_RANKS, _STEPS = 16, 8
"""A poll is a collective that waits for the slowest rank. More ranks than ``_MANY_RANKS`` poll every 8 steps."""
_SIGTERM_TIMEOUT = 20.0
"""Seconds that the SIGTERM handler waits for a save. Batch systems send SIGKILL 30 seconds after SIGTERM."""


class SaveHooks:
    """Polls a save after optimizer steps, and delays the end of the process until the save is written."""

    def __init__(self, save: Save, poll: Callable[[], object], marker: Path | None = None) -> None:
        """``marker``: a file that exists while the save is in flight, so that the launcher gives it time."""
        interval = 1 if save.world_size <= _MANY_RANKS else _STEPS
        steps = itertools.count(1)

        def poll_after_step(*_: object) -> None:
            if next(steps) % interval == 0:  # at the same step on all ranks
                poll()

        self._save, self._marker = save, marker
        if marker is not None:
            with contextlib.suppress(OSError):
                marker.touch()
        self._step_hook = register_optimizer_step_post_hook(poll_after_step)
        atexit.register(save.join_at_exit)  # no collective: the other ranks may have exited
        self._previous = None
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._on_sigterm)

    def remove(self) -> None:
        if self._marker is not None:
            with contextlib.suppress(OSError):
                self._marker.unlink(missing_ok=True)
        self._step_hook.remove()
        atexit.unregister(self._save.join_at_exit)
        if self._previous is not None and signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, self._previous)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Wait until this rank has written its part or the timeout expires, then call the previous handler."""
        self._save.join(_SIGTERM_TIMEOUT)
        if callable(self._previous):
            self._previous(number, frame)
        elif self._previous is not signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
