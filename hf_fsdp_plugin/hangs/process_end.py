"""How a rank ends: the record of its failure, SIGTERM, and threads that keep its process running."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.hangs import HANG
from hf_fsdp_plugin.hangs.python_stacks import Frame, current_stack
from hf_fsdp_plugin.hangs.watch_files import write_if_possible
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.rank_variables import ERROR_FILE_VARIABLE, EXIT_LIMIT_VARIABLE, launched_rank
from hf_fsdp_plugin.text import format_names

_PROGRAMS: Final = (os.path.join("launcher", "run_script.py"), os.path.join("hf_fsdp_plugin", "__main__.py"))
"""Files of this package that run the script: their frames are not shown."""
_MAX_FRAMES: Final = 300
CRASHES: Final = tuple(signal.Signals[f"SIG{name}"] for name in ("SEGV", "ABRT", "BUS", "FPE", "ILL", "TRAP", "SYS"))
"""Signals that a process receives because of what it does."""


def is_failure(error: BaseException) -> bool:
    """Return whether the process exits with a nonzero code. The system keeps the last eight bits of the code."""
    if not isinstance(error, SystemExit):
        return True
    return error.code % 256 != 0 if isinstance(error.code, int) else error.code is not None


def failure_of(error: BaseException) -> dict[str, Any]:
    """Return the failure as JSON."""
    content: dict[str, Any] = {"time": time.time(), "type": type(error).__name__, "frames": [], "traceback": ""}
    if isinstance(error, SystemExit):
        has_number = isinstance(error.code, int)
        more = {"message": "" if has_number else str(error.code), "code": error.code if has_number else 1}
        return content | {"kind": "exit", **more}
    details = traceback.TracebackException.from_exception(error, limit=-_MAX_FRAMES)
    content["frames"] = [
        {"file": f.filename, "line": f.lineno, "name": f.name, "code": f.line or ""}
        for f in details.stack
        if not f.filename.endswith(_PROGRAMS) and not f.filename.startswith("<frozen ")
    ]
    if isinstance(error, SpecError):
        codes = [problem.code for problem in error.problems]
        return content | {"kind": "spec", "message": str(error), "codes": codes}
    return content | {
        "kind": "interrupt" if isinstance(error, KeyboardInterrupt) else "exception",
        "message": "".join(details.format_exception_only()).strip(),
        "traceback": "".join(details.format()),
    }


def stack_of(failure: Mapping[str, Any] | None) -> list[Frame]:
    """Return the stack of a failure, outermost frame first; empty without one."""
    frames = failure["frames"] if failure else []
    return [Frame(each["file"], each["line"], each["name"], each.get("code", "")) for each in frames]


def write_error_file(message: str, details: str = "", seconds_ago: int = 0) -> None:
    """Write the error file of torch's agent, if there is an agent and the script has not written it.

    Args:
        message: one line.
        details: what the agent prints; by default the message.
        seconds_ago: when it happened. The agent names the earliest failure, in whole seconds, as the cause.
    """
    path = Path(os.environ.get(ERROR_FILE_VARIABLE, ""))
    if path.name and not path.exists():
        more = {"py_callstack": details or message, "timestamp": str(int(time.time()) - seconds_ago)}
        write_if_possible(path, json.dumps({"message": {"message": message, "extraInfo": more}}))


def has_failed() -> bool:
    """Return whether the script has ended with an exception."""
    return getattr(sys, "last_type", None) is not None


def print_block(text: str) -> None:
    """Print lines to stderr in one piece, also if another thread has stopped while it printed."""
    content = f"{text}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError):
        while content:
            content = content[os.write(2, content) :]


def ignore_sigterm() -> None:
    """Keep the exit code of this process, to which a launcher sends SIGTERM as soon as another rank has been killed.

    Python's own ``signal.signal`` works in the main thread only, which may never return.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGTERM, signal.SIG_IGN.value)


def exit_after_hang(seconds: float = 0.0) -> NoReturn:
    """Exit after ``seconds`` without calling exit handlers, and kill the children of this process."""
    time.sleep(seconds)

    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()

    flushing = threading.Thread(target=flush, daemon=True)  # the main thread may hold the locks of the streams
    flushing.start()
    flushing.join(time_limits.FLUSH)
    for child in multiprocessing.active_children():  # such as a worker of a data loader that never returns
        child.kill()
    os._exit(HANG)


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
        stack = current_stack(threading.main_thread().ident or 0)
        if not stack or stack[0].name in ("<module>", "_run_module_as_main"):
            return False
        # Exit handlers, such as the report, run after the threads have ended.
        if stack[0].file != threading.__file__ or not (held_by := _blocking_threads()):
            self._since = None
            return True
        self._since = self._since or time.monotonic()
        seconds = time.monotonic() - self._since
        message = f"the script has ended, but {held_by} keep the process running."
        fix = (
            "Stop these threads in the script, or create them with daemon=True. "
            f"The run fails after {self._limit:g} seconds ({EXIT_LIMIT_VARIABLE})."
        )
        if seconds >= min(time_limits.EXIT_NOTICE, self._limit) and not self._is_noticed:
            self._is_noticed = True
            self._notice(Problem(code="FSDP-W741", message=message, fix=fix))
        if seconds >= self._limit:
            message = f"{message} They did not end in {self._limit:g} seconds."
            self._fail(Problem(code="FSDP-E742", rank=launched_rank(), message=message, fix=fix))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        return True


def _blocking_threads() -> str:
    """Return which threads are not daemons, and their innermost frames; empty if there are none."""
    threads = [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    shown = []
    library = os.path.dirname(threading.__file__)
    for thread in threads:
        stack = current_stack(thread.ident or 0)
        place = next((each for each in reversed(stack) if os.path.dirname(each.file) != library), None)
        shown.append(f"{thread.name} ({place.location}, in {place.name})" if place is not None else thread.name)
    return f"non-daemon threads {format_names(shown, 3)}" if shown else ""
