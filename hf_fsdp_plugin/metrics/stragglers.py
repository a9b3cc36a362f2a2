"""Finds ranks that are slower than the others over several windows of steps.

Noise of a machine, such as another process on it, moves from rank to rank; a slow disk or a throttled device does not.
So a rank is reported if it is the slowest of :data:`NUM_WINDOWS` windows in succession, by the set share in each.
"""

from __future__ import annotations

from typing import Final

from hf_fsdp_plugin.metrics.figures import Slower, difference, slowest_rank
from hf_fsdp_plugin.metrics.rows import Rows

NUM_WINDOWS: Final = 3
"""Windows in succession until a rank is reported, and until a reported one that is as fast as others is forgotten."""
WINDOW_SECONDS: Final = 10.0
"""Shortest time of a window, in which the noise of single steps is averaged."""
WINDOW_STEPS: Final = 8
"""Fewest measured steps of a window."""
_LATEST: Final = 2
"""Steps that are not judged at the begin: they compile, and allocate memory."""


class StragglerSearch:
    """The search of one run.

    Args:
        share: by how much longer a step must be because of a rank, as a part of the step without the rank's delay.
        seconds: shortest time of a window.
    """

    def __init__(self, share: float, *, seconds: float = WINDOW_SECONDS) -> None:
        self._share, self._seconds = share, seconds
        self._before: Rows = {}
        self._candidate = self._reported = -1
        self._num_slow = self._num_even = 0

    def is_due(self, now: float) -> bool:
        """Return whether enough time has passed for a window that ends at a Unix time."""
        return not self._before or now - next(iter(self._before.values())).time >= self._seconds

    def add(self, now: Rows) -> Slower | None:
        """Return the rank that has to be reported at the end of a window, once.

        Args:
            now: the rows of all ranks at the same step.
        """
        if not now or min(row.step for row in now.values()) < _LATEST:
            return None
        before = self._before
        if before.keys() != now.keys():
            self._before = now
            return None
        first = min(now)
        if difference(before[first], now[first], "measured") < WINDOW_STEPS or not self.is_due(now[first].time):
            return None
        self._before = now
        return self._judge(slowest_rank(before, now))

    def _judge(self, slower: Slower | None) -> Slower | None:
        if slower is None or slower.by < self._share:
            self._candidate, self._num_slow = -1, 0
            self._num_even += 1
            if self._num_even >= NUM_WINDOWS:
                self._reported = -1
            return None
        self._num_even = 0
        self._num_slow = self._num_slow + 1 if slower.rank == self._candidate else 1
        self._candidate = slower.rank
        if self._num_slow < NUM_WINDOWS or slower.rank == self._reported:
            return None
        self._reported = slower.rank
        return slower
