"""The rows of the ranks: sums over the steps of each rank so far, in memory that the ranks of a machine share.

A log and the search for slow ranks read the row of the same step of all ranks. Nobody waits for a rank, and no
collective is called, so that a log of one rank alone cannot hang. The memory of a rank has the number of written rows,
and a ring of the newest ones. It has no file: the file is removed as soon as the ranks have mapped it.
"""

from __future__ import annotations

import contextlib
import mmap
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Final

from hf_fsdp_plugin.backends.ranks.agreement import gather_objects
from hf_fsdp_plugin.hangs.watch_files import scratch_folder

NUM_ROWS: Final = 256
"""Rows of the ring. The ranks of a machine differ by a step or two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What a rank has done until the end of a step. Times are seconds.

    Attributes:
        step: number of the step in this process, from 1.
        measured: steps whose times are in the sums: all, or some on an accelerator.
        time: Unix time of the end of the step.
        tokens: tokens of its training forwards so far, or samples if the model has no tokens.
        data, forward, backward, optimizer, saving, other: time in the phases so far, without ``waiting``.
        waiting: time so far in which its computation has waited for collectives.
        peak, reserved: bytes of memory of its device.
    """

    step: float = 0
    measured: float = 0
    time: float = 0.0
    tokens: float = 0
    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    saving: float = 0.0
    other: float = 0.0
    waiting: float = 0.0
    peak: float = 0.0
    reserved: float = 0.0


_NAMES: Final = tuple(each.name for each in fields(Row))
_ROW: Final = struct.Struct(f"{len(_NAMES)}d")
_COUNT: Final = struct.Struct("Q")
_SIZE: Final = _COUNT.size + NUM_ROWS * _ROW.size
Rows = Mapping[int, Row]
"""Rank -> its row of one step."""


class RankRows:
    """The rows of one rank, in memory that others may have mapped.

    Args:
        memory: of zeros at the begin.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @property
    def count(self) -> int:
        """Number of written rows."""
        count: int = _COUNT.unpack_from(self._memory)[0]
        return count

    def add(self, row: Row) -> None:
        """Write a row. Takes microseconds."""
        count = self.count
        _ROW.pack_into(self._memory, _COUNT.size + count % NUM_ROWS * _ROW.size, *astuple(row))
        _COUNT.pack_into(self._memory, 0, count + 1)

    def __getitem__(self, index: int) -> Row:
        """Return a row by its number from 0, which is that of the same step on all ranks."""
        return row_of(_ROW.unpack_from(self._memory, _COUNT.size + index % NUM_ROWS * _ROW.size))

    def close(self) -> None:
        self._memory.close()


def row_of(values: Sequence[float]) -> Row:
    """Return a row from its numbers in the order of the fields."""
    return Row(**dict(zip(_NAMES, values, strict=True)))


def share_rows(rank: int, machines: Sequence[str]) -> dict[int, RankRows]:
    """Return the rows of this rank, and of the other ranks of its machine that it sees. Collective.

    Args:
        machines: machine of each rank.
    """
    first = machines.index(machines[rank])
    folder = tempfile.mkdtemp(prefix="hf_fsdp_rows_", dir=scratch_folder()) if rank == first else ""
    shared = Path(gather_objects(folder)[first])
    own = RankRows(mmap.mmap(-1, _SIZE))
    with contextlib.suppress(OSError):  # such as a full disk: the other ranks do not see this one
        path = shared / str(rank)
        path.write_bytes(bytes(_SIZE))  # takes the space now: without it, a later change would end the process
        own = RankRows(_map(path))
    gather_objects(None)  # all files exist
    found = {rank: own}
    for other, machine in enumerate(machines):
        if rank == first and machine == machines[rank] and other != rank:
            with contextlib.suppress(OSError):
                found[other] = RankRows(_map(shared / str(other)))
    gather_objects(None)  # all files are mapped
    if rank == first:
        shutil.rmtree(shared, ignore_errors=True)
    return found


def _map(path: Path) -> mmap.mmap:
    with path.open("rb+") as file:
        return mmap.mmap(file.fileno(), _SIZE)


def newest_rows(ranks: Mapping[int, RankRows]) -> Rows:
    """Return the rows of the newest step that all ranks have; empty if there is none."""
    last = min((rows.count for rows in ranks.values()), default=0) - 1
    return {rank: rows[last] for rank, rows in ranks.items()} if last >= 0 else {}
