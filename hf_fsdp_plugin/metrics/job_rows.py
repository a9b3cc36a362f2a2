"""The rows of all ranks of a job at the same step. Machines exchange them over the job's store, without collectives.

The lowest rank of each machine reads the rows of its machine. With several machines, it sends those of every n-th step,
and rank 0 decides n once, so that a window takes some seconds::

    rows/stride     JSON: n
    rows/<r>        JSON: the number of rows so far, and the newest such rows of the machine whose lowest rank is r
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any, Final

from hf_fsdp_plugin.hangs.hang_queries import JobStore
from hf_fsdp_plugin.metrics.rows import RankRows, Rows, newest_rows, row_of

STRIDE_SECONDS: Final = 10.0
"""Shortest time of n steps."""
_MIN_STRIDE: Final = 8
_PAUSE: Final = 1.0
"""Seconds between two requests."""
_WAIT: Final = 0.05
"""Seconds that a training waits for a request, which goes on without it."""


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
            rows = {rank: astuple(each[index]) for rank, each in self._rows.items()}
            store.set(f"rows/{self._rank}", json.dumps([index, rows]))
        if self._rank == 0 and store.check(self._keys):
            parts = [json.loads(text) for text in store.multi_get(self._keys)]
            if len({index for index, _ in parts}) == 1:
                self._found = {int(rank): row_of(values) for _, rows in parts for rank, values in rows.items()}

    def close(self) -> None:
        """Make no more requests."""
        if self._store is not None:
            self._store.close()
