"""Figures of measured cases: medians, spread, throughput, efficiency, MFU, and ratios of systems. Imports no torch."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

Row = Mapping[str, Any]

_DRAWS: Final = 2000
_FIGURES: Final = (
    "step_seconds", "step_quartiles", "cpu_step_seconds", "samples_per_second", "tokens_per_second", "peak_bytes",
    "efficiency", "mfu", "loss",
)  # fmt: skip


def case_figures(rows: Sequence[Row], micro_batch: int, seq_len: int) -> list[dict[str, Any]]:
    """Return the figures of each case; null where it has no samples.

    ``step_seconds`` is the median of all blocks, and samples and tokens per second are those of all ranks in this time.
    ``efficiency`` is the throughput of a rank over that of the same case in the smallest measured world.
    """
    smallest: dict[tuple[Any, ...], tuple[int, float]] = {}
    for row in rows:
        if seconds := blocks_of(row, "seconds"):
            key, step = _key(row), statistics.median(seconds)
            if key not in smallest or row["world_size"] < smallest[key][0]:
                smallest[key] = (row["world_size"], step)
    found = []
    for row in rows:
        seconds = blocks_of(row, "seconds")
        if not seconds:
            found.append(dict.fromkeys(_FIGURES))
            continue
        step = statistics.median(seconds)
        samples = row["world_size"] * micro_batch / step
        peaks = [sample["peak_bytes"] for sample in row["samples"] if sample["peak_bytes"] is not None]
        has_peak = row.get("flops") and row.get("peak_flops")
        figures = {
            "step_seconds": step,
            "step_quartiles": quartiles(seconds),
            "cpu_step_seconds": statistics.median(blocks_of(row, "cpu_seconds")),
            "samples_per_second": samples,
            "tokens_per_second": samples * seq_len,
            "peak_bytes": int(statistics.median(peaks)) if peaks else None,
            "efficiency": smallest[_key(row)][1] / step,
            "mfu": row["flops"] / step / row["peak_flops"] if has_peak else None,
            "loss": _ordered(row)[-1]["losses"][-1],
        }
        found.append(figures)
    return found


def comparisons_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the comparison of each case of this package with the other systems, which ran in alternation.

    ``ratio`` is the throughput of this package over that of the other one: the median over the pairs of blocks, with a
    95% bootstrap interval of the median. ``cpu_ratio`` is the same of CPU time, on which other load has less effect.
    """
    by_setting: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        by_setting.setdefault((row["world_size"], *_setting(row)), {})[row["system"]] = row
    found = []
    for systems in by_setting.values():
        ours = systems.get("plugin")
        if ours is None:
            continue
        for name, other in systems.items():
            pairs = list(_pairs(ours, other)) if name != "plugin" else []
            if not pairs:
                continue
            ratios = [theirs[0] / own[0] for own, theirs in pairs]
            losses = [abs(own[2] - theirs[2]) / max(abs(theirs[2]), 1e-12) for own, theirs in pairs]
            found.append(
                {
                    "case": ours["case"],
                    "vs": name,
                    "pairs": len(pairs),
                    "ratio": statistics.median(ratios),
                    "ratio_95": list(median_interval(ratios)),
                    "cpu_ratio": statistics.median(theirs[1] / own[1] for own, theirs in pairs),
                    "relative_loss_difference": max(losses),
                }
            )
    return found


def blocks_of(row: Row, name: str) -> list[float]:
    """Return a value of every measured block of a case."""
    return [value for sample in row["samples"] for value in sample[name]]


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first and the third quartile."""
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def median_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return a 95% bootstrap interval of the median."""
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(_DRAWS))
    return medians[int(0.025 * _DRAWS)], medians[int(0.975 * _DRAWS) - 1]


def _pairs(ours: Row, other: Row) -> Iterator[tuple[tuple[float, float, float], tuple[float, float, float]]]:
    """Yield time, CPU time and loss of the blocks that both systems ran in the same round."""
    theirs = {sample["round"]: sample for sample in other["samples"]}
    for sample in ours["samples"]:
        if sample["round"] in theirs:
            yield from zip(_values(sample), _values(theirs[sample["round"]]), strict=False)


def _values(sample: Mapping[str, Any]) -> Iterator[tuple[float, float, float]]:
    return zip(sample["seconds"], sample["cpu_seconds"], sample["losses"], strict=True)


def _ordered(row: Row) -> list[Mapping[str, Any]]:
    return sorted(row["samples"], key=lambda sample: sample["round"])


def _setting(row: Row) -> tuple[Any, ...]:
    return row["strategy"], row["version"], row["prefetch"]


def _key(row: Row) -> tuple[Any, ...]:
    return (*_setting(row), row["system"])
