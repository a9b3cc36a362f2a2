"""Problems of a checkpoint's files and folders."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import NoReturn

from hf_fsdp_plugin.problems import CheckpointError, Origin, Problem

MAX_PATH = 4096
"""Maximum length of a path in Linux."""
_TRUSTED = "Use a copy of the checkpoint from a source that you trust."
COPY_AGAIN = "Copy the checkpoint again, or use another checkpoint."
"""Remedy for damaged and missing files."""
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


def problems_of(checks: Iterable[Callable[[], object]]) -> list[Problem]:
    """Call all checks, and return the problems of each ``CheckpointError`` that they raise."""
    problems: list[Problem] = []
    for check in checks:
        try:
            check()
        except CheckpointError as error:
            problems += error.problems
    return problems


def refuse_lfs_pointer(path: Path, content: bytes) -> None:
    """Raise a ``CheckpointError`` if ``content``, the file's first bytes, is a pointer of Git LFS."""
    if not content.startswith(b"version https://git-lfs.github.com/spec/"):
        return
    lines = content[:LFS_POINTER_SIZE].decode(errors="replace").splitlines()
    size = next((line.removeprefix("size ") for line in lines if line.startswith("size ")), "unknown")
    fix = "Run `git lfs pull` in its folder, or download the model again with `hf download`."
    refuse("FSDP-E469", path, f"is a pointer of Git LFS instead of the file, whose size is {size} bytes.", fix)


def file_problems_inside(root: Path, files: Iterable[str], place: Path | str) -> list[Problem]:
    """Return a problem for each file that ``place`` refers to, if it is missing or its path leaves ``root``."""
    problems = []
    for file in files:
        found = name_problem(file, place)
        if found is None and not (root / file).is_file():
            found = problem("FSDP-E457", place, f"refers to {file!r}, which is missing.", COPY_AGAIN)
        problems += [found] if found is not None else []
    return problems


def name_problem(relative: str, place: Path | str) -> Problem | None:
    """Return a problem if ``place`` refers to a file by a name that is invalid or leaves its folder."""
    if "\0" in relative or len(relative) > MAX_PATH:
        return problem("FSDP-E456", place, f"refers to {relative[:80]!r}, which is not a valid file name.", _TRUSTED)
    if PurePosixPath(relative).is_absolute() or ".." in PurePosixPath(relative).parts or "\\" in relative:
        return problem("FSDP-E456", place, f"refers to {relative!r}, which is outside its folder.", _TRUSTED)
    return None


@contextmanager
def read_errors_as_problems(place: Path, fix: str = COPY_AGAIN) -> Iterator[None]:
    """Raise ``CheckpointError`` if ``place``, which is read in the block, or a file in it cannot be read."""
    try:
        yield
    except OSError as error:
        refuse("FSDP-E472", error.filename or place, f"cannot be read: {error.strerror or error}.", fix)


_FREE_SPACE = "FSDP-E401", "Free space on this disk, or keep fewer checkpoints (save_total_limit)."
_NO_PERMISSION = "FSDP-E402", "Save to a folder with write permission."
_DISK_PROBLEMS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _FREE_SPACE),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), _NO_PERMISSION),
    errno.ENOTDIR: ("FSDP-E403", "Save to a folder."),
}
_OTHER = "FSDP-E404", "Check the disk, or save to another one."
_FULL = 1 << 20
"""A disk with less free space (bytes) counts as full, if a writer does not report why it failed."""


@contextmanager
def os_errors_as_problems(final: Path) -> Iterator[None]:
    """Raise ``CheckpointError`` for disk errors in the block, which writes the checkpoint ``final``."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = error
        if isinstance(reason, RuntimeError):  # torch.save does not report the reason
            with suppress(OSError):
                if shutil.disk_usage(final.parent).free < _FULL:
                    reason = OSError(errno.ENOSPC, "No space left on device")
        if not isinstance(reason, OSError):
            raise
        code, fix = _DISK_PROBLEMS.get(reason.errno or 0, _OTHER)
        place = f" ({reason.filename})" if reason.filename is not None else ""
        why = f"{final} could not be written: {reason.strerror or reason}{place}."
        message = f"{why} Checkpoints that were saved before are unchanged."
        raise CheckpointError([Problem(code=code, message=message, fix=fix)]) from error
