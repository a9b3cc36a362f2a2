"""How the script of a rank failed: the file for its launcher and other ranks, and the error file of torch's agent."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.hangs.places import Frame, is_library
from hf_fsdp_plugin.hangs.rank_files import write_atomically
from hf_fsdp_plugin.problems import SpecError

ERROR_FILE_VARIABLE: Final = "TORCHELASTIC_ERROR_FILE"
"""Environment variable of torch's agent, which prints what the file contains at the end of its output."""
_PROGRAMS: Final = (os.path.join("launcher", "run_script.py"), os.path.join("hf_fsdp_plugin", "__main__.py"))
"""Files of this package that run the script: their frames are not shown."""
_MAX_FRAMES: Final = 300
_CRASHES: Final = {
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Floating-point exception": signal.SIGFPE,
    "Floating point exception": signal.SIGFPE,
    "Illegal instruction": signal.SIGILL,
}
"""What ``faulthandler`` writes before the stack of a crash -> its signal."""


def is_failure(error: BaseException) -> bool:
    """Return whether the process exits with a nonzero code. The system keeps the last eight bits of the code."""
    if not isinstance(error, SystemExit):
        return True
    return error.code % 256 != 0 if isinstance(error.code, int) else error.code is not None


def failure_of(error: BaseException) -> dict[str, Any]:
    """Return the failure as JSON."""
    content: dict[str, Any] = {"time": time.time(), "type": type(error).__name__, "frames": [], "traceback": ""}
    if isinstance(error, SystemExit):
        return content | {"kind": "exit", "message": "" if isinstance(error.code, int) else str(error.code)}
    details = traceback.TracebackException.from_exception(error, limit=-_MAX_FRAMES)
    content["frames"] = [
        {"file": f.filename, "line": f.lineno, "name": f.name, "code": f.line or "", "library": is_library(f.filename)}
        for f in details.stack
        if not f.filename.endswith(_PROGRAMS) and not f.filename.startswith("<frozen ")
    ]
    if isinstance(error, SpecError):
        return content | {"kind": "spec", "message": str(error)}
    return content | {
        "kind": "interrupt" if isinstance(error, KeyboardInterrupt) else "exception",
        "message": "".join(details.format_exception_only()).strip(),
        "traceback": "".join(details.format()),
    }


def read_failure(path: Path) -> dict[str, Any] | None:
    """Return the failure that a rank has recorded; ``None`` if it has recorded none."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content


def read_crash(stacks: Path) -> int:
    """Return the signal of a crash in native code, whose stack a rank has recorded; 0 without one."""
    try:
        text = stacks.read_text(errors="replace")
    except OSError:
        return 0
    return next((number for words, number in _CRASHES.items() if f"Fatal Python error: {words}" in text), 0)


def stack_of(failure: Mapping[str, Any] | None) -> list[Frame]:
    """Return the stack of a failure, outermost frame first; empty without one."""
    return [Frame(each["file"], each["line"], each["name"]) for each in failure["frames"]] if failure else []


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
        write_atomically(path, json.dumps({"message": {"message": message, "extraInfo": more}}))
