"""Watches the exit of a rank: threads of the script can keep its process running after the script has ended."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType

from hf_fsdp_plugin.problems import Problem

LIMIT_VARIABLE = "HF_FSDP_EXIT_TIMEOUT"
"""Environment variable with the seconds for which threads may keep a rank running after its script has ended."""
DEFAULT_LIMIT = 300.0
_NOTICE_SECONDS = 5.0
_POLL_SECONDS = 0.5


def exit_limit() -> float:
    """Return the limit in seconds. Raises ``ValueError`` if the environment variable is not a positive number."""
    limit = float(os.environ.get(LIMIT_VARIABLE, "").strip() or DEFAULT_LIMIT)
    if not limit > 0:
        raise ValueError
    return limit


def watch_exit(limit: float, *, notice: Callable[[Problem], None], fail: Callable[[Problem], None]) -> None:
    """Report the threads for which the interpreter waits at its exit. Call it when the script has ended.

    Args:
        limit: seconds after which the process ends with ``fail``.
        notice: called once with a warning that names the threads.
        fail: records the error. The process exits with 1 afterwards, without exit handlers.
    """
    threading.Thread(target=_watch, args=(limit, notice, fail), name="hf_fsdp_exit", daemon=True).start()


def _watch(limit: float, notice: Callable[[Problem], None], fail: Callable[[Problem], None]) -> None:
    deadline = time.monotonic() + limit
    time.sleep(min(_NOTICE_SECONDS, limit))
    # Exit handlers, such as the report, run after these threads have ended.
    if not (held_by := _blocking_threads()):
        return
    message = f"the script has ended, but {_describe(held_by)} keep the process running."
    fix = "Stop these threads in the script, or create them with daemon=True."
    notice(
        Problem(
            code="FSDP-W741", message=message, fix=f"{fix} The run fails after {limit:g} seconds ({LIMIT_VARIABLE})."
        )
    )
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        if not _blocking_threads():
            return
    rank = int(os.environ.get("RANK", "0"))
    fail(Problem(code="FSDP-E742", rank=rank, message=f"{message} They did not end in {limit:g} seconds.", fix=fix))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


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
