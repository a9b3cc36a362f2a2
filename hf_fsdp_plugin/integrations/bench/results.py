"""The results of a benchmark: samples of each case, and the figures that are computed from them. Imports no torch."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from hf_fsdp_plugin.integrations.bench import Case, Task

_DRAWS: Final = 2000
"""Draws of a bootstrap interval."""
_FIGURES: Final = (
    "step_seconds", "step_quartiles", "cpu_step_seconds", "samples_per_second", "tokens_per_second", "peak_bytes",
    "efficiency", "loss",
)  # fmt: skip
ResultRow = Mapping[str, Any]


class Results:
    """The results of one benchmark.

    Args:
        head: what the benchmark measures, as JSON.
        cases: every case, in the order of the tables.
    """

    def __init__(self, head: Mapping[str, Any], cases: Iterable[Case]) -> None:
        self._head = dict(head)
        self._cases = {case.name: case for case in cases}
        empty = {"status": "pending", "reason": None, "peak_source": None}
        self._rows = {name: {**case.to_json(), **empty, "samples": []} for name, case in self._cases.items()}

    def add(self, event: Mapping[str, Any]) -> None:
        """Add the samples of an event ``measured`` of the ranks."""
        row = self._rows[event["case"]]
        row["samples"].append(
            {name: event[name] for name in ("round", "seconds", "cpu_seconds", "losses", "peak_bytes")}
        )
        is_complete = len(row["samples"]) == self._head["workload"]["rounds"]
        row |= {"peak_source": event["peak_source"], "status": "measured" if is_complete else "started"}

    def end(self, cases: Iterable[Case], status: str, reason: str) -> None:
        """Set why cases are not measured: ``failed`` or ``left out``."""
        for case in cases:
            self._rows[case.name] |= {"status": status, "reason": reason}

    def is_over(self, task: Task) -> bool:
        """Return whether a task is measured, or will not be."""
        rows = [self._rows[case.name] for case in task.cases]
        return all(
            row["status"] not in ("pending", "started") or any(each["round"] == task.round for each in row["samples"])
            for row in rows
        )

    def to_json(self) -> dict[str, Any]:
        rows = list(self._rows.values())
        statuses = {row["status"] for row in rows}
        return {
            "ok": "failed" not in statuses and "measured" in statuses,
            **self._head,
            "cases": [{**row, **self._figures(case)} for row, case in zip(rows, self._cases.values(), strict=True)],
            "comparisons": [
                comparison_of(self._rows[replace(case, system="plugin").name], row)
                for case, row in zip(self._cases.values(), rows, strict=True)
                if case.system != "plugin" and row["samples"]
            ],
        }

    def _figures(self, case: Case) -> dict[str, Any]:
        """Return the figures of a case; null if it has no samples.

        ``step_seconds`` is the median of all blocks, and samples and tokens per second are those of all ranks in this
        time. ``efficiency`` is the throughput of a rank over that of the same case in the smallest measured world.
        """
        row, workload = self._rows[case.name], self._head["workload"]
        seconds = blocks_of(row, "seconds")
        if not seconds:
            return dict.fromkeys(_FIGURES)
        step = statistics.median(seconds)
        samples = case.world_size * workload["micro_batch"] / step
        peaks = [sample["peak_bytes"] for sample in row["samples"] if sample["peak_bytes"] is not None]
        same = [each for each in self._cases.values() if replace(each, world_size=case.world_size) == case]
        measured = [each for each in same if self._rows[each.name]["samples"]]
        smallest = self._rows[min(measured, key=lambda each: each.world_size).name]
        return {
            "step_seconds": step,
            "step_quartiles": _quartiles(seconds),
            "cpu_step_seconds": statistics.median(blocks_of(row, "cpu_seconds")),
            "samples_per_second": samples,
            "tokens_per_second": samples * workload["seq_len"],
            "peak_bytes": int(statistics.median(peaks)) if peaks else None,
            "efficiency": statistics.median(blocks_of(smallest, "seconds")) / step,
            "loss": blocks_of(row, "losses")[-1],
        }


def comparison_of(ours: ResultRow, other: ResultRow) -> dict[str, Any]:
    """Return the comparison of a case of this package with another system, whose blocks ran in alternation.

    ``ratio`` is the throughput of this package over that of the other one: the median over the pairs of blocks, with a
    95% bootstrap interval of the median. ``cpu_ratio`` is this ratio for CPU time, on which other load has less effect.
    """
    seconds, cpu_seconds, losses = (
        list(zip(blocks_of(ours, name), blocks_of(other, name), strict=False))
        for name in ("seconds", "cpu_seconds", "losses")
    )
    ratios = [theirs / own for own, theirs in seconds]
    return {
        "case": ours["case"],
        "vs": other["system"],
        "pairs": len(ratios),
        "ratio": statistics.median(ratios),
        "ratio_95": _median_interval(ratios),
        "cpu_ratio": statistics.median(theirs / own for own, theirs in cpu_seconds),
        "relative_loss_difference": max(abs(own - theirs) / max(abs(theirs), 1e-12) for own, theirs in losses),
    }


def blocks_of(row: ResultRow, name: str) -> list[float]:
    """Return a value of every measured block of a case."""
    return [value for sample in row["samples"] for value in sample[name]]


def _quartiles(values: Sequence[float]) -> list[float]:
    """Return the first and the third quartile."""
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def _median_interval(ratios: Sequence[float]) -> list[float]:
    """Return a 95% bootstrap interval of the median."""
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(_DRAWS))
    return [medians[int(0.025 * _DRAWS)], medians[int(0.975 * _DRAWS) - 1]]
