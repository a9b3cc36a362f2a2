"""A file that a process maps into memory, and that others read while it runs and after it has ended.

A thread that changes a mapped page of a disk may wait until the page is written, for example while a checkpoint is. So
the file is in ``/dev/shm`` if that has space, with a link where the other processes look for it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

_MEMORY: Final = Path("/dev/shm")


def make_mapped_file(path: Path, size: int, *, in_memory: bool = True) -> Path:
    """Make a file of ``size`` zeros, and return where it is. Others open it, or a link to it, by ``path``.

    Args:
        in_memory: whether it may be in memory, which is lost with the container.

    Raises:
        OSError: ``path`` cannot be written, or the disk has no space.
    """
    remove_file(path)
    if in_memory and _MEMORY.is_mount():
        target = _MEMORY / f"hf_fsdp_{os.getuid()}_{os.getpid()}_{time.monotonic_ns()}"
        try:
            _make_file(target, size)
            path.symlink_to(target)
            return target
        except OSError:
            target.unlink(missing_ok=True)
    _make_file(path, size)
    return path


def remove_file(path: Path) -> None:
    """Remove a file, and what it links to. Does nothing if there is none. Raises ``OSError``."""
    if path.is_symlink():
        path.readlink().unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _make_file(path: Path, size: int) -> None:
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(bytes(size))  # takes the space now: without it, a later change would end the process
