"""Runs the user's script as a rank, with the plugin installed: ``python -m … [-m] SCRIPT ARGS…``.

``hf-fsdp launch`` starts this module. ``python -m hf_fsdp_plugin``, for other launchers, uses it too. The failure of
the script is recorded (see ``hangs.process_end``). Under ``hf-fsdp launch`` no traceback is printed, because the
launcher prints one summary for all ranks.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib.util
import io
import os
import runpy
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.hangs.process_end import is_failure
from hf_fsdp_plugin.launcher.flags import LaunchArguments
from hf_fsdp_plugin.problems import SpecError, UsageError
from hf_fsdp_plugin.rank_variables import FILES_VARIABLE, launched_local_rank
from hf_fsdp_plugin.state import process


def main() -> None:
    """Run the script given in ``sys.argv``. The process exits with the script's own exit code."""
    if FILES_VARIABLE in os.environ and launched_local_rank() != 0:  # one rank may read the terminal
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    module = sys.argv[1] == "-m"
    script, *args = sys.argv[2 if module else 1 :]
    run_rank(script, args, module=module)


def run_rank(script: str, args: Sequence[str], *, module: bool = False, **options: Any) -> None:
    """Install the plugin and run a script as this rank.

    Args:
        options: arguments of ``install``.
    """
    gc.disable()  # imports leave next to no garbage, and searching their objects takes a sixth of their time
    # lazy: the launcher and `check` import this module
    import hf_fsdp_plugin
    from hf_fsdp_plugin.integrations.failure_watch import watch

    try:
        watch().arm()
        hf_fsdp_plugin.install(**options)
        gc.freeze()  # what is imported stays, so that the script's collections need not search it either
        gc.enable()
        from hf_fsdp_plugin.integrations.observing import observed_run  # which install() has imported

        with observed_run():
            run(script, args, module=module)
    except BaseException as error:
        if not is_failure(error):
            watch().script_ended()
            raise
        from hf_fsdp_plugin.integrations.accelerate.run_report import RunReporter

        process.end(RunReporter)
        watch().failed(error)
        if watch().has_launcher and isinstance(error, SpecError):
            raise SystemExit(1) from None
        if watch().has_launcher and not isinstance(error, SystemExit):
            sys.excepthook = _without_stderr(sys.excepthook)
        raise
    watch().script_ended()


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


def _without_stderr(hook: Callable[..., Any]) -> Callable[..., None]:
    """Return ``hook``, an exception hook of another library, without its output. The launcher prints the summary."""

    def call(*details: Any) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            hook(*details)

    return call


def check_script(arguments: LaunchArguments) -> None:
    """Raise ``UsageError`` for a script or module that does not exist or cannot be run."""
    script = arguments.script
    if "module" in arguments.options:
        _check_module(script)
        return
    path = Path(script)
    if not os.path.exists(script):  # also if the name is too long for the file system, or contains a null byte
        raise UsageError(f"{script[:200]}: no such script.")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{script}: permission denied.")
    if path.is_dir():
        if not (path / "__main__.py").exists():
            raise UsageError(f"{script} is a directory without a __main__.py. Pass a script in it.")
    elif path.suffix in (".yaml", ".yml", ".json"):
        raise UsageError(f"{script} is a config, not a script. Write --config_file {script} SCRIPT.")


def _check_module(name: str) -> None:
    sys.path.insert(0, os.getcwd())  # python -m does this; the console script does not
    try:
        found = importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        found = False
    finally:
        del sys.path[0]
    if not found:
        raise UsageError(f"no module named {name}. Leave -m out to run a file.")


if __name__ == "__main__":
    main()
