"""What writers and mergers alike know of disks: direct I/O, and names and bytes that last. No torch."""

from __future__ import annotations

import errno
import os
from pathlib import Path

PAGE = 4096
"""Direct reads and writes begin and end at multiples of it, in the file and in memory."""
DIRECT = getattr(os, "O_DIRECT", 0)
REFUSED = (errno.EINVAL, errno.ENOTSUP, errno.EPERM)
"""How file systems without direct I/O say so."""


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, last: a file's own sync does not cover its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
