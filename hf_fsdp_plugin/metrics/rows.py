"""The rows of the ranks: sums over the steps of each rank so far, in memory that the ranks of a machine share.

A log and the search for slow ranks read the row of the same step of all ranks. Nobody waits for a rank, and no
collective is called, so that a log of one rank alone cannot hang. The memory of a rank has the number of written rows,
and a ring of the newest ones. It has no file: the file is removed as soon as the ranks have mapped it.

The lowest rank of each machine reads the rows of its machine. With several machines, they exchange rows over the job's
store: each sends those of every n-th step, and rank 0 decides n once, so that a window takes some seconds::

    rows/stride     JSON: n
    rows/<r>        JSON: the number of rows so far, and the newest such rows of the machine whose lowest rank is r
"""

from __future__ import annotations

import contextlib
import json
import mmap
import struct
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from hf_fsdp_plugin.backends.ranks.agreement import gather_objects
from hf_fsdp_plugin.hangs.hang_queries import JobStore
from hf_fsdp_plugin.hangs.watch_files import scratch_folder

NUM_ROWS: Final = 256
"""Rows of the ring. The ranks of a machine differ by a step or two."""
STRIDE_SECONDS: Final = 10.0
"""Shortest time of n steps."""
_MIN_STRIDE: Final = 8
_PAUSE: Final = 1.0
"""Seconds between two requests."""
_WAIT: Final = 0.05
"""Seconds that a training waits for a request, which goes on without it."""


class Row(NamedTuple):
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

    def since(self, before: Row) -> Row:
        """Return what the rank has done since an earlier row."""
        return Row(*(now - earlier for now, earlier in zip(self, before, strict=True)))


_ROW: Final = struct.Struct(f"{len(Row._fields)}d")
_COUNT: Final = struct.Struct("Q")
_SIZE: Final = _COUNT.size + NUM_ROWS * _ROW.size
Rows = Mapping[int, Row]
"""Rank -> its row of one step."""


class RankRows:
    """The rows of one rank, in memory that others may have mapped.

    Args:
        memory: of zeros at the begin.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    @property
    def count(self) -> int:
        """Number of written rows."""
        count: int = _COUNT.unpack_from(self._memory)[0]
        return count

    def add(self, row: Row) -> None:
        """Write a row. Takes microseconds."""
        count = self.count
        _ROW.pack_into(self._memory, _COUNT.size + count % NUM_ROWS * _ROW.size, *row)
        _COUNT.pack_into(self._memory, 0, count + 1)

    def __getitem__(self, index: int) -> Row:
        """Return a row by its number from 0, which is that of the same step on all ranks."""
        return Row(*_ROW.unpack_from(self._memory, _COUNT.size + index % NUM_ROWS * _ROW.size))


def share_rows(rank: int, machines: Sequence[str]) -> dict[int, RankRows]:
    """Return the rows of this rank, and of the other ranks of its machine that it sees. Collective.

    Args:
        machines: machine of each rank.
    """
    ranks = [other for other, machine in enumerate(machines) if machine == machines[rank]]
    first, size, path = ranks[0], len(ranks) * _SIZE, ""
    if rank == first:
        with (
            contextlib.suppress(OSError),  # such as a full disk: each rank sees only its own rows
            tempfile.NamedTemporaryFile(prefix="hf_fsdp_rows_", dir=scratch_folder(), delete=False) as file,
        ):
            path = file.name
            file.write(bytes(size))  # takes the space now: without it, a later change would end the process
    path = gather_objects(path)[first]
    memory, is_shared = mmap.mmap(-1, size), False
    with contextlib.suppress(OSError, ValueError), open(path, "rb+") as file:
        memory, is_shared = mmap.mmap(file.fileno(), size), True
    shares = gather_objects(is_shared)  # now all ranks have mapped the file
    if rank == first and path:
        Path(path).unlink(missing_ok=True)
    found = [other for other in ranks if other == rank or (rank == first and is_shared and shares[other])]
    places = {other: ranks.index(other) * _SIZE for other in found}
    return {other: RankRows(memoryview(memory)[place : place + _SIZE]) for other, place in places.items()}


def newest_rows(ranks: Mapping[int, RankRows]) -> Rows:
    """Return the rows of the newest step that all ranks have; empty if there is none."""
    last = min((rows.count for rows in ranks.values()), default=0) - 1
    return {rank: rows[last] for rank, rows in ranks.items()} if last >= 0 else {}


class JobRows:
    """The rows of a job, for the lowest rank of a machine.

    Args:
        rows: the rows of the ranks of this machine.
        machines: machine of each rank.
        connect: returns a connection to the store.
        seconds: see :data:`STRIDE_SECONDS`.
    """

    def __init__(
        self, rank: int, rows: dict[int, RankRows], machines: Sequence[str], connect: Callable[[], Any],
        seconds: float = STRIDE_SECONDS,
    ) -> None:  # fmt: skip
        firsts = sorted({machines.index(machine) for machine in machines})
        self._rank, self._rows, self._seconds = rank, rows, seconds
        self._keys = [f"rows/{first}" for first in firsts]
        self._store = JobStore(connect) if len(firsts) > 1 else None
        self._stride = self._sent = 0
        self._begun = self._asked = time.monotonic()
        self._found: Rows = {}

    def newest(self) -> Rows:
        """Return rows of all ranks at the same step; without new ones, the same as before, or none."""
        if self._store is None:
            return newest_rows(self._rows)
        now = time.monotonic()
        if now - self._asked >= min(_PAUSE, self._seconds):
            self._asked = now
            self._store.ask(self._exchange, _WAIT)
        return self._found

    def _exchange(self, store: Any) -> None:
        count = min(rows.count for rows in self._rows.values())
        if not self._stride:
            if self._rank == 0 and count >= _MIN_STRIDE and time.monotonic() - self._begun >= self._seconds:
                store.set("rows/stride", json.dumps(count))
            if not store.check(["rows/stride"]):
                return
            self._stride = json.loads(store.get("rows/stride"))
        if (index := (count - 1) // self._stride * self._stride) > self._sent:
            self._sent = index
            rows = {rank: each[index] for rank, each in self._rows.items()}
            store.set(f"rows/{self._rank}", json.dumps([index, rows]))
        if self._rank == 0 and store.check(self._keys):
            parts = [json.loads(text) for text in store.multi_get(self._keys)]
            if len({index for index, _ in parts}) == 1:
                self._found = {int(rank): Row(*values) for _, rows in parts for rank, values in rows.items()}

    def close(self) -> None:
        """Make no more requests."""
        if self._store is not None:
            self._store.close()
