"""The figures of a log, from the rows of the ranks at two steps. Names and meanings are in docs/metrics.md."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Final

from hf_fsdp_plugin.metrics.clock import PHASES, ClockPhase
from hf_fsdp_plugin.metrics.rows import Row, Rows

GIB: Final = float(1 << 30)


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


def difference(before: Row, now: Row, name: str) -> float:
    """Return by how much a number of a rank has grown between two steps."""
    found: float = getattr(now, name) - getattr(before, name)
    return found


def phase_seconds(before: Row, now: Row) -> dict[ClockPhase, float]:
    """Return the seconds of each phase between two steps, without waits for other ranks."""
    return {phase: difference(before, now, phase) for phase in PHASES}


def slowest_rank(before: Rows, now: Rows) -> Slower | None:
    """Return the rank whose own time between two steps is the longest; ``None`` for one rank.

    The own time is the time without waits for collectives: the ranks of a step end together, and all but the slowest
    one wait.
    """
    ranks = sorted(before.keys() & now.keys())
    if len(ranks) < 2:
        return None
    phases = {rank: phase_seconds(before[rank], now[rank]) for rank in ranks}
    own = {rank: sum(seconds.values()) for rank, seconds in phases.items()}
    slowest = max(ranks, key=own.__getitem__)
    others = [rank for rank in ranks if rank != slowest]
    lost = own[slowest] - statistics.median(own[rank] for rank in others)
    whole = own[slowest] + difference(before[slowest], now[slowest], "waiting")
    usual = {phase: statistics.median(phases[rank][phase] for rank in others) for phase in PHASES}
    phase = max(PHASES, key=lambda each: phases[slowest][each] - usual[each])
    steps = max(1.0, difference(before[slowest], now[slowest], "measured"))
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
    pairs = [(before[rank], now[rank]) for rank in before.keys() & now.keys()]
    seconds = statistics.mean(difference(*pair, "time") for pair in pairs) if pairs else 0.0
    if seconds <= 0:
        return {}
    rate = statistics.mean(difference(*pair, "tokens") for pair in pairs) / seconds
    found = {f"{counts}_per_second": rate * world_size, f"{counts}_per_second_per_rank": rate}
    if flops:
        found["tflops_per_rank"] = rate * flops / 1e12
        if peak is not None:
            found["mfu"] = rate * flops / peak
    whole = sum(sum(phase_seconds(*pair).values()) + difference(*pair, "waiting") for pair in pairs)
    if whole > 0:
        if waiting := sum(difference(*pair, "waiting") for pair in pairs):
            found["communication_exposed"] = waiting / whole
        found["data_wait"] = sum(difference(*pair, "data") for pair in pairs) / whole
    if (slower := slowest_rank(before, now)) is not None:
        found |= {"slowest_rank": slower.rank, "slowest_rank_by": slower.by}
    steps = difference(*pairs[0], "step")
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
