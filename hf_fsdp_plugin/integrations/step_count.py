"""The number of optimizer steps of this process, in shared memory that the launcher can read after a crash."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # the launcher reads the file without torch
    import torch

_FORMAT: Final = "<Q"


class StepCount:
    """Counts optimizer steps in the file that ``open`` maps into memory. Before, nothing is counted."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._num_steps = 0

    def open(self, path: Path) -> None:
        """Count from now on. The page survives a crash of the process, because the file backs it."""
        with path.open("w+b") as file:
            file.write(struct.pack(_FORMAT, 0))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), struct.calcsize(_FORMAT))
        self._num_steps = 0

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        self._memory = None

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the steps of an optimizer. Takes less than a microsecond per step."""
        if self._memory is not None:
            optimizer.register_step_post_hook(self._add)

    def _add(self, *_: Any) -> None:
        if self._memory is not None:
            self._num_steps += 1
            struct.pack_into(_FORMAT, self._memory, 0, self._num_steps)


step_count = StepCount()
"""The count of this process."""


def read_num_steps(path: Path) -> int | None:
    """Return the count that a process has written to ``path``; ``None`` if it did not count."""
    try:
        return int(struct.unpack(_FORMAT, path.read_bytes())[0])
    except (OSError, struct.error):
        return None
