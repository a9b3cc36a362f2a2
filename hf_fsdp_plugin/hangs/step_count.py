"""The numbers of optimizer steps and forwards of this process, in memory that others read after a crash."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # the launcher reads the file without torch
    import torch

_FORMAT: Final = "<QQQ"


@dataclass(frozen=True, slots=True)
class Counts:
    """What a process has counted.

    Attributes:
        steps: optimizer steps.
        forwards: forwards of sharded models that have begun, also without gradients; 0 if they are compiled.
        before: optimizer steps of the run that earlier processes had counted when they saved the checkpoint from which
            this process has resumed after a restart.
    """

    steps: int
    forwards: int
    before: int = 0


class StepCount:
    """Counts optimizer steps and forwards in the file that ``open`` maps into memory. Before, nothing is counted."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._num_steps = self._num_forwards = self._before = 0

    def open(self, path: Path) -> None:
        """Count from now on. The page survives a crash of the process, because the file backs it."""
        with path.open("w+b") as file:
            file.write(struct.pack(_FORMAT, 0, 0, 0))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), struct.calcsize(_FORMAT))
        self._num_steps = self._num_forwards = self._before = 0

    def forget(self) -> None:
        """Stop counting in a forked child, which must not change what its parent has counted."""
        self._memory = None

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        self._memory = None

    @property
    def total(self) -> int:
        """Optimizer steps of the run, without those that were trained again."""
        return self._before + self._num_steps

    @property
    def before(self) -> int:
        return self._before

    def resume_at(self, total: int) -> None:
        """Count on from the optimizer steps of the run that a checkpoint contains."""
        self._before = total - self._num_steps
        self._write()

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the steps of an optimizer. Takes less than a microsecond per step."""
        if self._memory is not None:
            optimizer.register_step_post_hook(self._add_step)

    def watch_forwards(self, model: torch.nn.Module) -> None:
        """Count the forwards of a model, before they gather parameters. Takes about a microsecond per forward."""
        if self._memory is not None:
            model.register_forward_pre_hook(self._add_forward, prepend=True)

    def _add_step(self, *_: Any) -> None:
        self._num_steps += 1
        self._write()

    def _add_forward(self, *_: Any) -> None:
        import torch

        if not torch.compiler.is_compiling():
            self._num_forwards += 1
            self._write()

    def _write(self) -> None:
        if self._memory is not None:
            struct.pack_into(_FORMAT, self._memory, 0, self._num_steps, self._num_forwards, self._before)


step_count = StepCount()
"""The count of this process."""


def read_counts(path: Path) -> Counts | None:
    """Return what a process has counted in ``path``; ``None`` if it did not count."""
    try:
        return Counts(*struct.unpack(_FORMAT, path.read_bytes()))
    except (OSError, struct.error):
        return None
