"""Runs the user's script as a rank, with the plugin installed: ``python -m … [-m] SCRIPT ARGS…``.

``hf-fsdp launch`` starts this module. It writes the script's failure to a file (see ``rank_files``) and prints no
traceback, because the launcher prints one summary for all ranks.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import hf_fsdp_plugin
from hf_fsdp_plugin.hangs.calls import LIMIT_VARIABLE
from hf_fsdp_plugin.hangs.exit_watch import exit_limit, watch_exit
from hf_fsdp_plugin.hangs.places import is_library, record_stacks
from hf_fsdp_plugin.hangs.rank_files import FILES_VARIABLE, RankFiles, write_atomically
from hf_fsdp_plugin.integrations.attempts import begin_attempt
from hf_fsdp_plugin.integrations.call_record import record_calls
from hf_fsdp_plugin.integrations.preflight.run import preflight
from hf_fsdp_plugin.integrations.profiling.in_rank import profiled_run
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.problems import SpecError

LAUNCHER_VARIABLE = "HF_FSDP_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1
_MAX_FRAMES = 300


def main() -> None:
    """Run the script given in ``sys.argv``. The process exits with the script's own exit code."""
    launcher = int(os.environ.pop(LAUNCHER_VARIABLE, "0"))
    files = RankFiles(Path(stem)) if (stem := os.environ.pop(FILES_VARIABLE, "")) else None
    if launcher:
        _exit_with_launcher(launcher)
    if files is not None:
        record_stacks(files.stacks)
        session.in_flight_file = files.saving
        begin_attempt(files)
        if float(os.environ.get(LIMIT_VARIABLE) or 0):
            record_calls(files.calls)
    module = sys.argv[1] == "-m"
    script, *args = sys.argv[2 if module else 1 :]
    try:
        hf_fsdp_plugin.install()
        preflight.begin_in_rank()
        with profiled_run():
            run(script, args, module=module)
    except BaseException as error:
        preflight.end(error if is_failure(error) else None)
        if is_failure(error):
            # lazy: the launcher imports this module
            from hf_fsdp_plugin.integrations.run_report import stop_reporting
            from hf_fsdp_plugin.integrations.shard_errors import add_remedy

            stop_reporting()
            add_remedy(error)
            if files is not None:
                write_atomically(files.failure, json.dumps(_failure_of(error)))
        elif files is not None:
            _watch_exit(files)
        if files is None:
            raise
        if isinstance(error, SpecError):
            raise SystemExit(1) from None
        if not isinstance(error, SystemExit):
            sys.excepthook = _without_stderr(sys.excepthook)
        raise
    preflight.end()
    if files is not None:
        _watch_exit(files)


def _watch_exit(files: RankFiles) -> None:
    write_atomically(files.ended, "")
    watch_exit(
        exit_limit(),
        notice=lambda problem: write_atomically(files.notice, str(problem)),
        fail=lambda problem: write_atomically(files.failure, json.dumps(_failure_of(SpecError([problem])))),
    )


def run(script: str, args: Sequence[str], *, module: bool = False) -> None:
    """Run a script or a module as ``__main__``, with ``sys.argv`` and ``sys.path[0]`` as Python sets them."""
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
    # runpy.run_path removes the module after the script's last line, but exit handlers, threads and pickles still
    # need its names in __main__.
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


def _exit_with_launcher(launcher: int) -> None:
    """Kill this process when the launcher is killed, so that no rank is orphaned. Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # the launcher exited before the line above
            os._exit(1)


def is_failure(error: BaseException) -> bool:
    """Return whether the process exits with a nonzero code. The system keeps the last eight bits of the code."""
    if not isinstance(error, SystemExit):
        return True
    return error.code % 256 != 0 if isinstance(error.code, int) else error.code is not None


def _failure_of(error: BaseException) -> dict[str, Any]:
    """Return the failure for the launcher as JSON."""
    content: dict[str, Any] = {"time": time.time(), "type": type(error).__name__, "frames": [], "traceback": ""}
    if isinstance(error, SystemExit):
        return content | {"kind": "exit", "message": "" if isinstance(error.code, int) else str(error.code)}
    details = traceback.TracebackException.from_exception(error, limit=-_MAX_FRAMES)
    content["frames"] = [
        {"file": f.filename, "line": f.lineno, "name": f.name, "code": f.line or "", "library": is_library(f.filename)}
        for f in details.stack
        if f.filename != __file__ and not f.filename.startswith("<frozen ")
    ]
    if isinstance(error, SpecError):
        return content | {"kind": "spec", "message": str(error)}
    return content | {
        "kind": "interrupt" if isinstance(error, KeyboardInterrupt) else "exception",
        "message": "".join(details.format_exception_only()).strip(),
        "traceback": "".join(details.format()),
    }


def _without_stderr(hook: Callable[..., Any]) -> Callable[..., None]:
    """Return ``hook``, an exception hook of another library, without its output. The launcher prints the summary."""

    def call(*details: Any) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            hook(*details)

    return call


if __name__ == "__main__":
    main()
