"""Checks that the script to launch exists and can be run, before any rank starts."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from hf_fsdp_plugin.launcher.flags import LaunchArguments, UsageError

_NUM_BYTES_CHECKED = 4096


def check_script(arguments: LaunchArguments) -> None:
    """Raise ``UsageError`` for a script or module that does not exist or cannot be run."""
    script = arguments.script
    if "module" in arguments.options:
        _check_module(script)
        return
    path = Path(script)
    try:
        exists = path.exists()
    except (OSError, ValueError):  # the name is too long for the file system, or contains a null byte
        exists = False
    if not exists:
        hint = (
            " If it is the value of a flag, leave it out: the flag takes no value."
            if script.lower() in ("true", "false")
            else ""
        )
        raise UsageError(f"{script[:200]}: no such script.{hint}")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{script}: permission denied.")
    if path.is_dir():
        if not (path / "__main__.py").exists():
            raise UsageError(f"{script} is a directory without a __main__.py. Pass a script in it.")
    elif path.suffix in (".yaml", ".yml", ".json"):
        raise UsageError(f"{script} is a config, not a script. Write --config_file {script} SCRIPT.")
    elif path.is_file() and path.suffix not in (".pyc", ".zip", ".pyz") and _is_binary(path):
        raise UsageError(f"{script} is binary, not a Python script.")


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(_NUM_BYTES_CHECKED)


def _check_module(name: str) -> None:
    sys.path.insert(0, os.getcwd())  # python -m does this; the console script does not
    try:
        found = importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        found = False
    finally:
        del sys.path[0]
    if not found:
        hint = " Leave -m out to run a file." if Path(name).exists() else ""
        raise UsageError(f"no module named {name}.{hint}")
