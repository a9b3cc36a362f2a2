"""The place of a config that a verb writes: ``config``, ``convert`` and ``migrate``."""

from __future__ import annotations

import os
from pathlib import Path

from hf_fsdp_plugin.checkpoint.io import write_atomically
from hf_fsdp_plugin.problems import Origin, Problem, SpecError


def check_place(path: Path, shown: str, *, makes_folders: bool = False) -> None:
    """Raise ``SpecError`` if a file cannot be written at a path.

    Args:
        shown: the path in messages.
        makes_folders: whether :func:`write_config` may make folders that do not exist.
    """
    folder = path.parent
    while makes_folders and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if path.is_dir():
        raise _unwritable(shown, "it is a folder")
    if not folder.is_dir():
        raise _unwritable(shown, f"{folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _unwritable(shown, f"no permission to write to {folder}")


def file_exists_error(shown: str, message: str, option: str) -> SpecError:
    """Return the error of a file that is not replaced without ``--force``."""
    fix = f"Pass --force to change it, or another path with {option}."
    return SpecError([Problem(code="FSDP-E761", message=message, fix=fix, origin=Origin(source=shown))])


def write_config(path: Path, shown: str, text: str) -> None:
    """Write a config, and the folders that it needs. Raises ``SpecError`` if this fails; then nothing has changed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text, preserve=True)
    except OSError as error:
        raise _unwritable(shown, error.strerror or str(error)) from None


def _unwritable(shown: str, reason: str) -> SpecError:
    message = f"the file cannot be written: {reason}. It was not changed."
    fix = "Choose another path."
    return SpecError([Problem(code="FSDP-E764", message=message, fix=fix, origin=Origin(source=shown))])
