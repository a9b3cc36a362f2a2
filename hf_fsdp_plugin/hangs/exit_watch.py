"""Watches the exit of a rank: threads of the script can keep its process running after the script has ended."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Final

from hf_fsdp_plugin.problems import Problem

LIMIT_VARIABLE = "HF_FSDP_EXIT_TIMEOUT"
"""Environment variable with the seconds for which threads may keep a rank running after its script has ended."""
DEFAULT_LIMIT = 300.0
_NOTICE_SECONDS = 5.0
_SCRIPT: Final = ("<module>", "_run_module_as_main")
"""Outermost functions of the main thread while it runs a script."""


def exit_limit() -> float:
    """Return the limit in seconds. Raises ``ValueError`` if the environment variable is not a positive number."""
    limit = float(os.environ.get(LIMIT_VARIABLE, "").strip() or DEFAULT_LIMIT)
    if not limit > 0:
        raise ValueError
    return limit


class ExitWatch:
    """Reports the threads for which the interpreter waits at its exit.

    Args:
        limit: seconds after which the process ends with ``fail``.
        notice: called once with a warning that names the threads.
        fail: records the error. The process exits with 1 afterwards, without exit handlers.
    """

    def __init__(self, limit: float, *, notice: Callable[[Problem], None], fail: Callable[[Problem], None]) -> None:
        self._limit, self._notice, self._fail = limit, notice, fail
        self._since: float | None = None
        self._is_noticed = False

    def poll(self) -> bool:
        """Return whether the script has ended. Call it in a thread, again and again."""
        outermost = _outermost_of_main()
        if outermost is None or outermost.f_code.co_name in _SCRIPT:
            return False
        # Exit handlers, such as the report, run after the threads have ended.
        if outermost.f_code.co_filename != threading.__file__ or not (held_by := _blocking_threads()):
            self._since = None
            return True
        self._since = self._since or time.monotonic()
        seconds = time.monotonic() - self._since
        message = f"the script has ended, but {_describe(held_by)} keep the process running."
        fix = "Stop these threads in the script, or create them with daemon=True."
        if seconds >= min(_NOTICE_SECONDS, self._limit) and not self._is_noticed:
            self._is_noticed = True
            more = f"{fix} The run fails after {self._limit:g} seconds ({LIMIT_VARIABLE})."
            self._notice(Problem(code="FSDP-W741", message=message, fix=more))
        if seconds >= self._limit:
            rank = int(os.environ.get("RANK", "0"))
            message = f"{message} They did not end in {self._limit:g} seconds."
            self._fail(Problem(code="FSDP-E742", rank=rank, message=message, fix=fix))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        return True


def _outermost_of_main() -> FrameType | None:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _blocking_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]


def _describe(threads: list[threading.Thread]) -> str:
    frames = sys._current_frames()
    shown = [f"{thread.name} ({_place(frames.get(thread.ident or 0))})" for thread in threads[:3]]
    more = f" and {len(threads) - 3} more" if len(threads) > 3 else ""
    return f"non-daemon threads {', '.join(shown)}{more}"


def _place(frame: FrameType | None) -> str:
    """Return file, line and function of the innermost frame outside the standard library."""
    library = os.path.dirname(threading.__file__)
    stack = traceback.extract_stack(frame)
    frames = [each for each in stack if os.path.dirname(each.filename) != library] or stack
    return f"{frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else "starting"
