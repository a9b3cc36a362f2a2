"""What the system says of a write that failed, as a checkpoint's problem: which checkpoint, why, and what to do."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_fsdp_plugin.problems import CheckpointError, Problem

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_FIXES = {
    **dict.fromkeys(_NO_SPACE, "Free space there, or keep fewer checkpoints (save_total_limit)."),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "Save to a folder that can be written to."),
    errno.ENOTDIR: "Save to a folder.",
}
_OTHER_FIX = "See to the disk, or save to another one."
_FULL = 1 << 20
"""Bytes free below which a disk counts as full, for writers that do not say why they failed."""


@contextmanager
def in_words(final: Path) -> Iterator[None]:
    """Raise ``CheckpointError`` for what goes wrong with the disk in the block, of a save that is to be ``final``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError([_problem(final, error)]) from error
    except RuntimeError as error:  # torch.save has no word for the reason
        if not _is_full(final.parent):
            raise
        full = OSError(errno.ENOSPC, "No space left on device")
        raise CheckpointError([_problem(final, full)]) from error


def _problem(final: Path, error: OSError) -> Problem:
    return Problem(
        severity="error",
        message=f"{final} could not be written: {error.strerror or error}{_where(error)}; what was saved before is as "
        "it was.",
        fix=_FIXES.get(error.errno or 0, _OTHER_FIX),
    )


def _where(error: OSError) -> str:
    return f" ({error.filename})" if error.filename is not None else ""


def _is_full(folder: Path) -> bool:
    with suppress(OSError):
        return shutil.disk_usage(folder).free < _FULL
    return False
