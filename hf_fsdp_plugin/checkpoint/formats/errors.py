"""Problems of a checkpoint's files and folders."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from hf_fsdp_plugin.problems import CheckpointError, Origin, Problem

COPY_AGAIN = "Copy the checkpoint again, or use another checkpoint."
"""What to do about damaged and missing files."""
COPY_ALL_RANKS = "Copy the files of all ranks into one folder; they may be on other machines."


def problem(code: str, place: Path | str, message: str, fix: str = "") -> Problem:
    """Return a problem of the file or folder ``place``."""
    return Problem(code=code, message=message, fix=fix, origin=Origin(source=str(place)))


def refuse(code: str, place: Path | str, message: str, fix: str = COPY_AGAIN) -> NoReturn:
    """Raise a ``CheckpointError`` with a single problem."""
    raise CheckpointError([problem(code, place, message, fix)])


def raise_if_any(problems: list[Problem]) -> None:
    """Raise all problems as one ``CheckpointError``; do nothing if there are none."""
    if problems:
        raise CheckpointError(problems)
