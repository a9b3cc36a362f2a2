"""The text and the JSON of ``hf-fsdp profile``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from hf_fsdp_plugin.observe.profile.rank_profile import Times
from hf_fsdp_plugin.observe.profile.run_profile import RankWait, RunProfile, UnitProfile
from hf_fsdp_plugin.observe.profile.suggestions import Suggestion
from hf_fsdp_plugin.observe.profile.trace import PHASE_NAMES
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_bytes, format_seconds, format_table, plural

_MOST_UNITS: Final = 8
_MOST_RANKS: Final = 8
_LEAST_LATE: Final = 0.01
"""Share of a step by which a rank must be late to be listed."""


def profile_text(run: RunProfile, suggestions: Sequence[Suggestion]) -> str:
    """Return the tables: phases, units, ranks, memory and suggestions."""
    plan = run.facts.get("plan", {})
    model = f"{plan['model']}, {plan['backend']} {plan['strategy']}, " if plan else ""
    title = f"{model}{plural(run.world_size, 'rank')} on {run.device}: average of {plural(run.num_steps, 'step')}"
    parts = [f"{title}\n{_phases(run)}\n{_overhead(run)}"]
    if any(unit.communication.calls for unit in run.units):
        parts.append(_units(run.units))
    parts.append(_waits(run))
    if (peak := run.peak) is not None:
        kinds = ", ".join(f"{kind} {format_bytes(size, binary=True)}" for kind, size in peak.bytes_by_kind.items())
        parts.append(f"memory of rank 0: {format_bytes(peak.bytes, binary=True)} in {peak.where}: {kinds}")
    parts.append(
        "\n".join(["suggestions:", *(f"  {each}" for each in suggestions)] if suggestions else ["suggestions: none"])
    )
    return "\n\n".join(parts)


def _share(times: Times) -> float:
    """Return the share of communication in computation plus communication, as in the usual table of a profile."""
    whole = times.compute + times.communication
    return times.communication / whole if whole else 0.0


def _phases(run: RunProfile) -> str:
    rows: list[tuple[str, ...]] = [("phase", "time", "computation", "communication", "share", "exposed", "idle")]
    for name, times in [*((PHASE_NAMES[phase], each) for phase, each in run.times.items()), ("total", run.total)]:
        seconds = (times.compute, times.communication)
        rows.append(
            (
                name, format_seconds(times.seconds), *map(format_seconds, seconds), f"{_share(times):.0%}",
                format_seconds(times.exposed), format_seconds(times.idle),
            )
        )  # fmt: skip
    return format_table(rows, right=range(1, 7))


def _overhead(run: RunProfile) -> str:
    if run.overhead_seconds is None or not run.unprofiled_seconds:
        return "overhead of the profiler: unknown, because there was no step without it."
    relative = run.overhead_seconds / run.unprofiled_seconds
    return (
        f"overhead of the profiler: {format_seconds(run.overhead_seconds)} per step ({relative:+.1%}); a step without "
        f"it takes {format_seconds(run.unprofiled_seconds)}."
    )


def _units(units: Sequence[UnitProfile]) -> str:
    slowest = sorted(units, key=lambda unit: -unit.communication.exposed)[:_MOST_UNITS]
    head = ("slowest units", "order", "forward gather", "backward gather", "reduction", "exposed", "forward", "bytes")
    rows: list[tuple[str, ...]] = [head]
    for unit in slowest:
        sums = (unit.gather_forward, unit.gather_backward, unit.reduce)
        rows.append(
            (
                unit.name or "(root)", str(unit.order), *(format_seconds(each.seconds) for each in sums),
                format_seconds(unit.communication.exposed), format_seconds(unit.forward_seconds),
                format_bytes(round(unit.communication.bytes)),
            )
        )  # fmt: skip
    more = [f"… and {len(units) - len(slowest):,} more"] if len(units) > len(slowest) else []
    return "\n".join([format_table(rows, right=range(1, 8)), *more])


def _waits(run: RunProfile) -> str:
    late = _late_ranks(run)
    if not late:
        return "stragglers: none. No rank keeps the others waiting for 1% of a step."
    rows = [("stragglers", "others wait", "share of step", "last in", "computation")]
    for rank in late:
        rows.append(
            (
                f"rank {rank.rank}", format_seconds(rank.late_seconds), f"{rank.late_seconds / run.total.seconds:.0%}",
                f"{rank.last_share:.0%} of the calls", format_seconds(rank.compute_seconds),
            )
        )  # fmt: skip
    return format_table(rows, right=range(1, 5))


def _late_ranks(run: RunProfile) -> list[RankWait]:
    """Return the ranks for which all others wait, the latest first."""
    late = [rank for rank in run.ranks if rank.late_seconds >= _LEAST_LATE * run.total.seconds]
    return sorted(late, key=lambda rank: -rank.late_seconds)[:_MOST_RANKS]


def profile_json(
    run: RunProfile, suggestions: Sequence[Suggestion], files: dict[str, Any], problems: Sequence[Problem]
) -> dict[str, Any]:
    """Return the object of ``profile --json``. Times are seconds of one step, averaged over steps and ranks."""
    overhead = {"profiled_seconds": run.profiled_seconds, "unprofiled_seconds": run.unprofiled_seconds}
    return {
        "ok": True,
        "world_size": run.world_size, "num_ranks": run.num_ranks, "num_steps": run.num_steps, "device": run.device,
        "phases": {phase: _times_json(times) for phase, times in run.times.items()},
        "total": _times_json(run.total),
        "overhead": {**overhead, "seconds": run.overhead_seconds},
        "collectives": {kind: asdict(sums) for kind, sums in run.collectives.items()},
        "units": [asdict(unit) for unit in run.units],
        "ranks": [asdict(rank) for rank in run.ranks],
        "memory": {
            "peak_bytes": run.peak.bytes if run.peak is not None else None,
            "moments": [
                {"where": moment.where, "seconds": moment.seconds, "bytes": dict(moment.bytes_by_kind)}
                for moment in run.memory
            ],
        },
        "suggestions": [each.to_json() for each in suggestions],
        "files": files,
        "problems": [problem.to_json() for problem in problems],
    }  # fmt: skip


def _times_json(times: Times) -> dict[str, float]:
    return {
        "seconds": times.seconds, "compute_seconds": times.compute, "communication_seconds": times.communication,
        "exposed_seconds": times.exposed, "idle_seconds": times.idle, "communication_share": _share(times),
    }  # fmt: skip
