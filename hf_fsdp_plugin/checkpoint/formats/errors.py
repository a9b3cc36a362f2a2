"""Problems of a checkpoint's files and folders."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from hf_fsdp_plugin.problems import CheckpointError, Origin, Problem

COPY_AGAIN = "Copy the checkpoint again, or use another checkpoint."
"""What to do about damaged and missing files."""
LFS_POINTER_SIZE = 1024
"""Maximum size in bytes of a pointer of Git LFS (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)."""
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


def refuse_lfs_pointer(path: Path, content: bytes) -> None:
    """Raise a ``CheckpointError`` if ``content``, the file's first bytes, is a pointer of Git LFS."""
    if not content.startswith(b"version https://git-lfs.github.com/spec/"):
        return
    lines = content[:LFS_POINTER_SIZE].decode(errors="replace").splitlines()
    size = next((line.removeprefix("size ") for line in lines if line.startswith("size ")), "unknown")
    refuse(
        "FSDP-E469",
        path,
        f"is a pointer of Git LFS instead of the file, whose size is {size} bytes.",
        "Run `git lfs pull` in its folder, or download the model again with `hf download`.",
    )
