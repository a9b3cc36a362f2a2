"""Waits until this machine sees a file or folder that another machine has created or renamed.

Clients of network file systems cache the names in a folder, also of files that did not exist, for up to a minute (NFS:
``acdirmax``). A wait that takes longer than a few seconds is announced on stderr.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from hf_fsdp_plugin.problems import CheckpointError, Problem

TIMEOUT = 75.0
"""Seconds: longer than a client of NFS caches the names in a folder."""
_ANNOUNCED = 3.0
"""Seconds after which a wait is announced."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0


def await_path(path: Path) -> bool:
    """Return whether a path exists that exists on another machine, after at most ``TIMEOUT`` seconds."""
    start, pause, announced = time.monotonic(), _FIRST_PAUSE, False
    while not path.exists():
        waited = time.monotonic() - start
        if waited > TIMEOUT:
            return False
        if waited > _ANNOUNCED and not announced:
            rank = os.environ.get("RANK", "0")
            text = f"rank {rank} waits for {path}, which rank 0 sees, for up to {TIMEOUT:g} seconds."
            print(f"hf-fsdp: {text}", file=sys.stderr, flush=True)
            announced = True
        with suppress(OSError):
            os.listdir(path.parent)  # lets the client ask the server
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


def check_visible(path: Path, did: str) -> None:
    """Wait for a path that rank 0 sees.

    Args:
        did: what rank 0 did, for the message: ``created``.

    Raises:
        CheckpointError: this rank does not see it after ``TIMEOUT`` seconds.
    """
    if not await_path(path):
        message = f"rank 0 {did} {path}, but this rank cannot see it: the ranks have no common file system."
        fix = "Save to a folder that all machines share, and resume from there."
        raise CheckpointError([Problem(code="FSDP-E405", message=message, fix=fix)])
