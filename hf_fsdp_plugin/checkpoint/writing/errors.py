"""Converts errors of the operating system during a save to problems: which checkpoint, why, and what to do."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_fsdp_plugin.problems import CheckpointError, Problem

_CODES_AND_FIXES = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT),
        ("FSDP-E401", "Free space on this disk, or keep fewer checkpoints (save_total_limit)."),
    ),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), ("FSDP-E402", "Save to a folder with write permission.")),
    errno.ENOTDIR: ("FSDP-E403", "Save to a folder."),
}
_OTHER = ("FSDP-E404", "Check the disk, or save to another one.")
_FULL = 1 << 20
"""A disk with less free space (bytes) counts as full, if a writer does not report why it failed."""


@contextmanager
def os_errors_as_problems(final: Path) -> Iterator[None]:
    """Raise ``CheckpointError`` for disk errors in the block, which writes the checkpoint ``final``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError([_problem(final, error)]) from error
    except RuntimeError as error:  # torch.save does not report the reason
        if not _is_full(final.parent):
            raise
        full = OSError(errno.ENOSPC, "No space left on device")
        raise CheckpointError([_problem(final, full)]) from error


def _problem(final: Path, error: OSError) -> Problem:
    code, fix = _CODES_AND_FIXES.get(error.errno or 0, _OTHER)
    place = f" ({error.filename})" if error.filename is not None else ""
    message = (
        f"{final} could not be written: {error.strerror or error}{place}. Checkpoints that were saved before are "
        "unchanged."
    )
    return Problem(code=code, message=message, fix=fix)


def _is_full(folder: Path) -> bool:
    with suppress(OSError):
        return shutil.disk_usage(folder).free < _FULL
    return False
