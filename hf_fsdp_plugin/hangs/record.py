"""Records the collectives, optimizer steps and forwards of this process in memory that others read.

Other ranks and the launcher read it also while the process is stopped or dead. :mod:`calls` describes the files of the
collectives. A record takes about a microsecond. Nothing is recorded before ``open``.
"""

from __future__ import annotations

import itertools
import json
import mmap
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from hf_fsdp_plugin.hangs.calls import (
    ARRIVALS,
    BEAT_AT,
    CALL_WORDS,
    COUNT_AT,
    FORMAT,
    HEADER_WORDS,
    NUM_SLOTS,
    SINCE_AT,
    SLOTS_AT,
    WAITING_AT,
    WORD,
    CallFiles,
    pack_ranks,
)

if TYPE_CHECKING:  # torch is imported with the first process group
    import torch
    import torch.distributed as dist
if TYPE_CHECKING:  # the launcher reads the file without torch
    import torch

_MAX_LINES: Final = 0xFFFF
_MAX_PENDING: Final = 4096


class _GroupCount:
    """The number of collectives of one process group, and its line in the table of names, shifted."""

    __slots__ = ("line", "number")

    def __init__(self, line: int) -> None:
        self.line = line << 48
        self.number = 0


class CallRecord:
    """The record of this process.

    Attributes:
        is_open: whether collectives are recorded.
        unit: name of the FSDP unit whose collectives are being called; empty for none.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.is_open = False
        self.unit = ""
        self._words: Any = [0] * HEADER_WORDS
        self._memory: mmap.mmap | None = None
        self._names: BinaryIO | None = None
        self._lines: dict[str, int] = {}
        self._num_lines = 0
        self._dtypes: dict[Any, int] = {}
        self._groups: dict[str, _GroupCount] = {}
        self._pending: dict[int, int] = {}
        self._positions = itertools.count()
        self._last = 0
        self._main = threading.main_thread().ident or 0

    @property
    def main(self) -> int:
        """The thread that trains: its waits are recorded, and its stack is the place of the rank."""
        return self._main

    def follow_thread(self) -> None:
        """Take the calling thread as the one that trains, which is not always the main thread of the process."""
        self._main = get_ident()

    def beat(self) -> None:
        """Record that the watcher of this rank runs."""
        if self.is_open:
            self._words[BEAT_AT] = monotonic_ns()

    def forget(self) -> None:
        """Stop recording in a forked child, which must not change what its parent has recorded."""
        self._memory = self._names = None
        self._reset()

    def open(self, files: CallFiles) -> None:
        """Record from now on. The files survive a crash of the process. Raises ``OSError``."""
        self.close()
        self._names = files.names.open("wb", buffering=0)
        self._line("")
        size = (HEADER_WORDS + NUM_SLOTS * CALL_WORDS) * WORD
        with files.calls.open("w+b") as file:
            file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        self._words = memoryview(self._memory).cast("Q")
        self._words[SLOTS_AT] = NUM_SLOTS
        self._words[0] = FORMAT
        self.follow_thread()
        self.is_open = True

    def close(self) -> None:
        """Stop recording, and forget what was recorded."""
        if self._memory is not None:
            self._words.release()
            self._memory.close()
        if self._names is not None:
            self._names.close()
        self._reset()

    def _line(self, name: str, peer: int | None = None) -> int:
        """Return the line of a name in the table, which is appended if it is new; 0 if the table is full."""
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = self._append(name if peer is None else {"operation": name, "peer": peer})
        return line

    def _append(self, content: Any) -> int:
        if self._num_lines >= _MAX_LINES or self._names is None:
            return 0
        self._names.write(f"{json.dumps(content)}\n".encode())  # before a call refers to it
        self._num_lines += 1
        return self._num_lines - 1

    def begin(self, group: dist.ProcessGroup, operation: str, tensors: Any) -> int:
        """Record a collective before it is called, and return its position in the record.

        Args:
            operation: its name in messages.
            tensors: the tensor that this rank passes, a list of tensors, or a list of such lists; ``None`` without one.
        """
        try:
            count = self._groups.get(group.group_name) or self._add_group(group)
            while isinstance(tensors, (list, tuple)):
                tensors = tensors[0] if tensors else None
            lines = self._lines
            packed = (lines.get(operation) or self._line(operation)) << 32
            if self.unit:
                packed |= lines.get(self.unit) or self._line(self.unit)
            if tensors is None:
                return self._write(count, 0, packed)
            dtype = self._dtypes.get(tensors.dtype) or self._dtype(tensors.dtype)
            return self._write(count, tensors.numel(), packed | dtype << 16)
        except Exception:  # a full disk, or tensors of an unknown kind: the collective itself must not fail
            return self._last

    def begin_named(self, group: str, operation: str, peer: int | None = None) -> int:
        """Record a call that is no collective of torch, or a send or a receive. See :meth:`begin`.

        Args:
            peer: the other rank of a send or a receive.
        """
        count = self._groups.get(group)
        if count is None:
            count = self._groups[group] = _GroupCount(self._append({"group": group, "ranks": "", "timeout": 0}))
        return self._write(count, 0, self._line(operation, peer) << 32)

    def _write(self, count: _GroupCount, num_elements: int, packed: int) -> int:
        position = next(self._positions)  # atomic: other threads have collectives too
        words = self._words
        count.number = number = count.number + 1
        start = HEADER_WORDS + position % NUM_SLOTS * CALL_WORDS
        words[start] = number
        words[start + 1] = num_elements
        words[start + 2] = count.line | packed
        words[start + 3] = monotonic_ns()
        words[COUNT_AT] = position + 1
        self._last = position
        return position

    def started(self, work: Any, position: int) -> None:
        """Remember which collective a ``Work`` belongs to, until it is waited for."""
        if len(self._pending) >= _MAX_PENDING:  # works for which nobody waits
            self._pending.clear()
        self._pending[id(work)] = position

    def position_of(self, work: Any) -> int:
        """Return the position of the collective of a ``Work``; that of the newest one if it is unknown."""
        return self._pending.pop(id(work), self._last)

    @property
    def last(self) -> int:
        """Position of the newest collective."""
        return self._last

    def waits(self, position: int) -> None:
        """Record that this thread begins to wait for a collective.

        Other threads than the one that trains are ignored: they may wait for long in the background, as in a save.
        """
        if get_ident() == self._main:
            words = self._words
            words[SINCE_AT] = monotonic_ns()
            words[WAITING_AT] = position + 1

    def waited(self) -> None:
        """Record that the wait is over."""
        if get_ident() == self._main:
            self._words[WAITING_AT] = 0

    def on_arrival(self, call: str | None) -> None:
        """Record the plugin's own waits for all ranks: a call at its begin, ``None`` at its end."""
        if not self.is_open:
            return
        if call is None:
            self.waited()
        else:
            self.waits(self.begin_named(ARRIVALS, call))

    def _dtype(self, dtype: torch.dtype) -> int:
        line = self._dtypes[dtype] = self._line(str(dtype).removeprefix("torch."))
        return line

    def _add_group(self, group: dist.ProcessGroup) -> _GroupCount:
        import torch.distributed as dist

        from hf_fsdp_plugin.torch_private.process_groups import timeout_of

        try:
            ranks: Sequence[int] = dist.get_process_group_ranks(group)
        except (KeyError, ValueError, RuntimeError):  # a group that torch does not know, such as a test's
            ranks = ()
        timeout = timeout_of(group)
        seconds = timeout.total_seconds() if timeout is not None else 0
        line = self._append(
            {
                "group": group.group_name,
                "ranks": pack_ranks(ranks),
                "timeout": seconds,
                "enqueues": dist.get_backend(group) not in ("gloo", "mpi"),
            }
        )
        count = self._groups[group.group_name] = _GroupCount(line)
        return count


record = CallRecord()
"""The record of this process."""


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
