"""The files in which a rank records what it does, for the other ranks of its machine and for its launcher."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HANG: Final = 75
"""Exit code of a run that was ended because of a hang. EX_TEMPFAIL of sysexits.h: try again."""
FILES_VARIABLE = "HF_FSDP_RANK_FILES"
"""Environment variable with the path of a rank's files, without their suffix; set by ``hf-fsdp launch``."""
LAUNCHER_VARIABLE = "HF_FSDP_LAUNCHER_PID"
"""Environment variable with the process of ``hf-fsdp launch``, which prints what its ranks report."""
RUN_ID_VARIABLE = "HF_FSDP_RUN_ID"
"""Environment variable with the id of the run, the same on all machines; set by ``hf-fsdp launch`` or a user."""
LOG_VARIABLE = "HF_FSDP_LOG_DIR"
"""Environment variable with the folder of ``--log_dir``."""


class _RankFile:
    """A file of one rank."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix

    def __get__(self, files: RankFiles, owner: type) -> Path:
        return files.stem.with_suffix(self.suffix)


class _MachineFile(_RankFile):
    """A file that all ranks of a machine have in common."""

    def __get__(self, files: RankFiles, owner: type) -> Path:
        return files.stem.with_name(self.suffix)


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one rank.

    Attributes:
        stem: their path without the suffix.
    """

    stem: Path
    failure = _RankFile(".json")
    """JSON: how the script failed, written before the rank exits (see ``hangs.rank_exit``)."""
    notice = _RankFile(".notice")
    """A text that the launcher prints."""
    ended = _RankFile(".ended")
    """Exists if the script has ended without an error."""
    process = _RankFile(".pid")
    """JSON: the rank's process, its start and its machine (see ``hangs.processes``)."""
    hang = _MachineFile("hang.json")
    """JSON: the hang that ends the ranks of this machine (``hangs.hang_report.FoundHang``). One for all of them."""
    cause = _MachineFile("cause")
    """Exists if a rank that SIGTERM has ended has said why. One for all ranks of this machine."""
    stacks = _RankFile(".stacks")
    """Stacks of the rank's threads (see ``hangs.rank_stacks``)."""
    steps = _RankFile(".steps")
    """The numbers of optimizer steps and forwards (see ``hangs.record``)."""
    restarts = _MachineFile("restarts.json")
    """JSON: the failed attempts of the run (``runs.restart_policy``). The launcher writes it for all its ranks."""
    saving = _RankFile(".saving")
    """Exists while a checkpoint is written in the background."""
    calls = _RankFile(".calls")
    """The rank's collectives (see ``hangs.record``)."""


def remove_files(stem: Path) -> None:
    """Remove the files of one rank."""
    for file in vars(RankFiles).values():
        if type(file) is _RankFile:
            stem.with_suffix(file.suffix).unlink(missing_ok=True)


def private_folder(folder: Path) -> None:
    """Make a folder below another one that both belong to this user only.

    Raises:
        OSError: it cannot be made, or another user has made it, or a link.
    """
    for each in (*reversed(folder.parents[:2]), folder):
        each.mkdir(mode=0o700, exist_ok=True)
        found = each.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "it is not a folder of this user only", str(each))


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is never seen incomplete. Does nothing if that is not possible, such as on a full disk."""
    partial = path.with_name(f"{path.name}.part")
    with suppress(OSError):
        partial.write_text(text)
        os.replace(partial, path)
