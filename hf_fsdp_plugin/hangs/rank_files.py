"""The files in which a rank tells its launcher what it does. They are in the launcher's temporary folder."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hf_fsdp_plugin.hangs.call_files import CallFiles

FILES_VARIABLE = "HF_FSDP_RANK_FILES"
"""Environment variable with the path of a rank's files, without their suffix."""


LOG_DIR_VARIABLE = "HF_FSDP_LOG_DIR"
"""Environment variable with the folder for what is written about a hang; the working directory without it."""


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one rank.

    Attributes:
        stem: their path without the suffix.
    """

    stem: Path

    @property
    def failure(self) -> Path:
        """JSON: how the script failed, written before the rank exits (see ``run_script``)."""
        return self.stem.with_suffix(".json")

    @property
    def notice(self) -> Path:
        """A text that the launcher prints."""
        return self.stem.with_suffix(".notice")

    @property
    def ended(self) -> Path:
        """Exists if the script has ended without an error."""
        return self.stem.with_suffix(".ended")

    @property
    def stacks(self) -> Path:
        """Stacks of the rank's threads (see ``places``)."""
        return self.stem.with_suffix(".stacks")

    @property
    def steps(self) -> Path:
        """The numbers of optimizer steps and forwards (see ``hangs.step_count``)."""
        return self.stem.with_suffix(".steps")

    @property
    def restarts(self) -> Path:
        """JSON: the failed attempts of the run (``runs.restarts``). The launcher writes it for all its ranks."""
        return self.stem.with_name("restarts.json")

    @property
    def hang(self) -> Path:
        """JSON: the hang because of which the ranks of this machine end themselves (``runs.exits.FoundHang``)."""
        return self.stem.with_name("hang.json")

    @property
    def calls(self) -> CallFiles:
        """The rank's collectives (see ``hangs``)."""
        return CallFiles(self.stem.with_suffix(".calls"), self.stem.with_suffix(".names"))

    @property
    def saving(self) -> Path:
        """Exists while a checkpoint is written in the background."""
        return self.stem.with_suffix(".saving")


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is never seen incomplete. Does nothing if that is not possible, such as on a full disk."""
    partial = path.with_name(f"{path.name}.part")
    with suppress(OSError):
        partial.write_text(text)
        os.replace(partial, path)
