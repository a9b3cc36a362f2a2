"""The figures of a log, from the rows of the ranks at two steps, and the search for slow ranks.

Names and meanings of the figures are in docs/metrics.md. Noise of a machine, such as another process on it, moves from
rank to rank; a slow disk or a throttled device does not. So a rank is reported if it is the slowest of
:data:`NUM_WINDOWS` windows of steps in succession, by the set share in each.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Final

from hf_fsdp_plugin.metrics.clock import PHASES, ClockPhase
from hf_fsdp_plugin.metrics.rows import Row, Rows

GIB: Final = float(1 << 30)
NUM_WINDOWS: Final = 3
"""Windows in succession until a rank is reported, and until a reported one that is as fast as others is forgotten."""
WINDOW_SECONDS: Final = 10.0
"""Shortest time of a window, in which the noise of single steps is averaged."""
WINDOW_STEPS: Final = 8
"""Fewest measured steps of a window."""
_LATEST: Final = 2
"""Steps that are not judged at the begin: they compile, and allocate memory."""


def passes(total: int, trainable: int) -> float:
    """Return the FLOPs of a training step over those of its forward, without recomputation.

    A backward has the FLOPs of two forwards: one for the gradients of the inputs, one for those of trainable weights.
    """
    return 2.0 + (trainable / total if total else 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slower:
    """How much the rank with the longest steps is slower than the others.

    Attributes:
        by: by how much of itself a step would be shorter if the rank were as fast as the median of the other ranks.
        phase: the phase in which the rank loses most.
        seconds, usual: seconds of a step in this phase, of the rank and of the median of the others.
    """

    rank: int
    by: float
    phase: ClockPhase
    seconds: float
    usual: float


def phase_seconds(row: Row) -> dict[ClockPhase, float]:
    """Return the seconds of each phase, without waits for other ranks."""
    return {phase: getattr(row, phase) for phase in PHASES}


def slowest_rank(before: Rows, now: Rows) -> Slower | None:
    """Return the rank whose own time between two steps is the longest; ``None`` for one rank.

    The own time is the time without waits for collectives: the ranks of a step end together, and all but the slowest
    one wait.
    """
    ranks = sorted(before.keys() & now.keys())
    if len(ranks) < 2:
        return None
    done = {rank: now[rank].since(before[rank]) for rank in ranks}
    phases = {rank: phase_seconds(row) for rank, row in done.items()}
    own = {rank: sum(seconds.values()) for rank, seconds in phases.items()}
    slowest = max(ranks, key=own.__getitem__)
    others = [rank for rank in ranks if rank != slowest]
    lost = own[slowest] - statistics.median(own[rank] for rank in others)
    whole = own[slowest] + done[slowest].waiting
    usual = {phase: statistics.median(phases[rank][phase] for rank in others) for phase in PHASES}
    phase = max(PHASES, key=lambda each: phases[slowest][each] - usual[each])
    steps = max(1.0, done[slowest].measured)
    by = lost / max(whole - lost, 1e-9)
    return Slower(rank=slowest, by=by, phase=phase, seconds=phases[slowest][phase] / steps, usual=usual[phase] / steps)


def figures_of(
    before: Rows, now: Rows, *, world_size: int, counts: str = "tokens", flops: float = 0.0, peak: float | None = None
) -> dict[str, float]:
    """Return the figures of the steps between two rows of each rank.

    Args:
        before, now: rows of the same ranks, which may be some of all ranks.
        counts: what the ranks count: ``tokens`` or ``samples``.
        flops: FLOPs of the model per token, forward and backward.
        peak: FLOP/s of the device of a rank; ``None`` if they are unknown.
    """
    done = [now[rank].since(before[rank]) for rank in before.keys() & now.keys()]
    seconds = statistics.mean(row.time for row in done) if done else 0.0
    if seconds <= 0:
        return {}
    rate = statistics.mean(row.tokens for row in done) / seconds
    found = {f"{counts}_per_second": rate * world_size, f"{counts}_per_second_per_rank": rate}
    if flops:
        found["tflops_per_rank"] = rate * flops / 1e12
        if peak is not None:
            found["mfu"] = rate * flops / peak
    waiting = sum(row.waiting for row in done)
    whole = sum(sum(phase_seconds(row).values()) for row in done) + waiting
    if whole > 0:
        if waiting:
            found["communication_exposed"] = waiting / whole
        found["data_wait"] = sum(row.data for row in done) / whole
    if (slower := slowest_rank(before, now)) is not None:
        found |= {"slowest_rank": slower.rank, "slowest_rank_by": slower.by}
    steps = done[0].step
    return {"step_seconds": seconds / steps, **found} if steps else found


def memory_figures(now: Rows, total: float | None) -> dict[str, float]:
    """Return the largest memory of a rank.

    Args:
        total: memory of a device, or of the machine on the CPU; ``None`` if it is unknown.
    """
    peak, reserved = (max((getattr(row, name) for row in now.values()), default=0.0) for name in ("peak", "reserved"))
    found = {"memory_peak_gib": peak / GIB}
    if reserved:
        found["memory_reserved_gib"] = reserved / GIB
    return found | ({"memory_share": max(peak, reserved) / total} if total else {})


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
        if now[first].measured - before[first].measured < WINDOW_STEPS or not self.is_due(now[first].time):
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
