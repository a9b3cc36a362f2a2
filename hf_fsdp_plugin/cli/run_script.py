"""What runs inside a rank: the plugin is installed, then the user's script runs as if Python had started it.

``python -m hf_fsdp_plugin.cli.run_script [-m] SCRIPT ARGS…``, started by ``hf-fsdp launch``. How the script ended goes
to the file that ``HF_FSDP_FAILURE_FILE`` names; the launcher tells it once for all ranks: no traceback is printed here.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import io
import json
import os
import runpy
import signal
import site
import sys
import sysconfig
import time
import traceback
import types
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import hf_fsdp_plugin
from hf_fsdp_plugin.problems import SpecError

FAILURE_VARIABLE = "HF_FSDP_FAILURE_FILE"
LAUNCHER_VARIABLE = "HF_FSDP_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1
_MAX_FRAMES = 300


def main() -> None:
    """Entry of a rank. Ends with the script's own exit code."""
    launcher = int(os.environ.pop(LAUNCHER_VARIABLE, "0"))
    failure_file = os.environ.pop(FAILURE_VARIABLE, "")
    if launcher:
        _end_with(launcher)
    # A crash in native code (a segmentation fault) then says where in Python it happened.
    with contextlib.suppress(ValueError, OSError, io.UnsupportedOperation):
        faulthandler.enable()
    words = sys.argv[1:]
    module = words[0] == "-m"
    script, args = (words[1], words[2:]) if module else (words[0], words[1:])
    try:
        hf_fsdp_plugin.install()
        run(script, args, module=module)
    except BaseException as error:
        if is_failure(error):
            from hf_fsdp_plugin.integrations.run_report import (
                abandon,  # not at the top: the launcher reads this file's names
            )

            abandon()
        if not failure_file:
            raise
        _record(error, Path(failure_file))
        if isinstance(error, SpecError):
            raise SystemExit(1) from None
        if not isinstance(error, SystemExit):
            sys.excepthook = _quietly(sys.excepthook)
        raise


def run(script: str, args: Sequence[str], *, module: bool = False) -> None:
    """Runs a script or a module as ``__main__``, with ``sys.argv`` and ``sys.path[0]`` as Python itself sets them."""
    sys.argv = [script, *args]
    if module:
        sys.path[0] = os.getcwd()
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(script)
    if os.path.isdir(path) or path.endswith(".pyc"):
        runpy.run_path(path, run_name="__main__")
        return
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    # Not runpy.run_path: it takes the module away again when the script's last line is done, while exit handlers,
    # threads and pickles still look for their names in __main__.
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(
        __file__=path,
        __builtins__=builtins,
        __loader__=SourceFileLoader("__main__", path),
        __cached__=None,
        __annotations__={},
    )
    sys.modules["__main__"] = main_module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, main_module.__dict__)


def _end_with(launcher: int) -> None:
    """The rank dies with a launcher that could not say goodbye (SIGKILL): no orphans. Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died before the line above
            os._exit(1)


def is_failure(error: BaseException) -> bool:
    """Of an exit code, the system keeps the last eight bits."""
    if not isinstance(error, SystemExit):
        return True
    return error.code % 256 != 0 if isinstance(error.code, int) else error.code is not None


def _record(error: BaseException, file: Path) -> None:
    """Writes how the script ended, for the launcher; nothing where it ended well."""
    if not is_failure(error):
        return
    content: dict[str, Any] = {"time": time.time(), "type": type(error).__name__, "frames": [], "traceback": ""}
    if isinstance(error, SpecError):
        content |= {"kind": "spec", "message": str(error)}
    elif isinstance(error, SystemExit):
        content |= {"kind": "exit", "message": "" if isinstance(error.code, int) else str(error.code)}
    else:
        shown = traceback.TracebackException.from_exception(error, limit=-_MAX_FRAMES)
        content |= {
            "kind": "interrupt" if isinstance(error, KeyboardInterrupt) else "exception",
            "message": "".join(shown.format_exception_only()).strip(),
            "frames": [
                {"file": f.filename, "line": f.lineno, "name": f.name, "code": f.line or "", "library": _is_library(f)}
                for f in shown.stack
                if not _is_ours(f.filename)
            ],
            "traceback": "".join(shown.format()),
        }
    waiting = file.with_suffix(".part")
    with contextlib.suppress(OSError):
        waiting.write_text(json.dumps(content))
        waiting.replace(file)


def _quietly(hook: Callable[..., Any]) -> Callable[..., None]:
    """Hooks of the user's libraries still see the exception; what they print is dropped, as the launcher tells it."""

    def call(*details: Any) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            hook(*details)

    return call


def _is_ours(filename: str) -> bool:
    return filename == __file__ or filename.startswith("<frozen ")


def _is_library(frame: traceback.FrameSummary) -> bool:
    package = str(Path(__file__).resolve().parents[1])
    roots = [package, sysconfig.get_paths()["stdlib"], *site.getsitepackages(), site.getusersitepackages()]
    return frame.filename.startswith("<") or any(frame.filename.startswith(root + os.sep) for root in roots)


if __name__ == "__main__":
    main()
