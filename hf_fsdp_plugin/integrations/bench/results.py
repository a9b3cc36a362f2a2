"""The results of a benchmark: samples of each case, and the figures that are computed from them. Imports no torch."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.integrations.bench.cases import Case
from hf_fsdp_plugin.integrations.profiling.files import write_file
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.version import SCHEMA_VERSION

KIND: Final = "hf-fsdp bench"
_SAME: Final = ("model", "workload", "settings", "device", "threads")
"""What a benchmark must have in common with the file that it continues."""
_DRAWS: Final = 2000
"""Draws of a bootstrap interval."""
_FIGURES: Final = (
    "step_seconds", "step_quartiles", "cpu_step_seconds", "samples_per_second", "tokens_per_second", "peak_bytes",
    "efficiency", "mfu", "loss",
)  # fmt: skip
Row = Mapping[str, Any]


class Results:
    """The results of one benchmark and their file, which is complete at any time.

    Args:
        path: ``None`` if no file is written.
        head: what the benchmark measures, as JSON.
        cases: every case, in the order of the tables.
    """

    def __init__(self, path: Path | None, head: Mapping[str, Any], cases: Iterable[Case]) -> None:
        self.path, self._head = path, dict(head)
        self._rows: dict[str, dict[str, Any]] = {case.name: _row(case) for case in cases}

    def resume(self, tree: Mapping[str, Any]) -> None:
        """Take over the measured rounds of a file that :func:`read_results` has read.

        Raises:
            SpecError: the file is of another benchmark (FSDP-E785).
        """
        other = [name for name in _SAME if _comparable(name, tree.get(name)) != _comparable(name, self._head[name])]
        if other:
            message = f"{self.path} is the result of another benchmark: its {' and '.join(other)} differ."
            fix = "Repeat the command of this file with --resume, or choose another file with -o."
            raise SpecError([Problem(code="FSDP-E785", message=message, fix=fix)])
        for row in tree["cases"]:
            own = self._rows.get(row["case"])
            if own is not None and row["status"] == "measured":
                own["samples"] = [each for each in row["samples"] if each["round"] < self._rounds]
                own["peak_source"] = row.get("peak_source")
                own["status"] = "measured" if self.missing_rounds(row["case"]) == [] else "started"
            elif own is None:
                self._rows[row["case"]] = dict(row)  # a case that this command does not name

    @property
    def _rounds(self) -> int:
        return int(self._head["workload"]["rounds"])

    def missing_rounds(self, name: str) -> list[int]:
        """Return the rounds in which a case is still to be measured."""
        row = self._rows[name]
        if row["status"] not in ("pending", "started", "measured"):
            return []
        found = {sample["round"] for sample in row["samples"]}
        return [number for number in range(self._rounds) if number not in found]

    def add(self, event: Mapping[str, Any]) -> None:
        """Add the samples of an event ``measured`` of the ranks, and write the file."""
        row = self._rows[event["case"]]
        kept = {name: event[name] for name in ("round", "seconds", "cpu_seconds", "losses", "peak_bytes")}
        row["samples"] = [*(each for each in row["samples"] if each["round"] != event["round"]), kept]
        row["peak_source"] = event["peak_source"]
        row["status"] = "started"
        if not self.missing_rounds(event["case"]):
            row["status"] = "measured"
        self.write()

    def end(self, name: str, status: str, reason: str) -> None:
        """Set why a case is not measured: ``failed``, ``does not fit`` or ``impossible``."""
        self._rows[name] |= {"status": status, "reason": reason}

    def predict(self, name: str, *, num_bytes: int, flops: float | None, peak_flops: float | None) -> None:
        """Set the predicted peak of memory, the model's FLOPs of a step of one rank, and the FLOP/s of its device."""
        self._rows[name] |= {"predicted_bytes": num_bytes, "flops": flops, "peak_flops": peak_flops}

    def to_json(self) -> dict[str, Any]:
        workload = self._head["workload"]
        rows = list(self._rows.values())
        figures = case_figures(rows, workload["micro_batch"], workload["seq_len"])
        shown = [{**row, **figure} for row, figure in zip(rows, figures, strict=True)]
        failed = any(row["status"] == "failed" for row in rows)
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": KIND,
            "ok": not failed and any(row["status"] == "measured" for row in rows),
            **self._head,
            "cases": shown,
            "comparisons": comparisons_of(rows),
        }

    def write(self) -> None:
        """Write the file, complete or not at all.

        Raises:
            SpecError: the file cannot be written (FSDP-E789).
        """
        if self.path is None:
            return
        try:
            write_file(self.path, json.dumps(self.to_json(), indent=1) + "\n")
        except OSError as error:
            message = f"cannot write {self.path}: {error.strerror or error}."
            fix = "Choose a file in a folder that exists, is writable and has space, with -o."
            raise SpecError([Problem(code="FSDP-E789", message=message, fix=fix)]) from error


def read_results(path: Path) -> dict[str, Any]:
    """Return the content of a file of a benchmark.

    Raises:
        SpecError: it cannot be read, or is another file (FSDP-E785).
    """
    reason = "it is not a file that hf-fsdp bench has written"
    try:
        tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if tree["kind"] == KIND and isinstance(tree["cases"], list) and _are_rows(tree["cases"]):
            return tree
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, TypeError, KeyError):
        pass
    fix = "Without --resume and with --force, the benchmark begins anew and replaces the file."
    raise SpecError([Problem(code="FSDP-E785", message=f"cannot continue {path}: {reason}.", fix=fix)])


def _are_rows(rows: Sequence[Any]) -> bool:
    keys = {"case", "status", "samples"}
    samples = {"round", "seconds", "cpu_seconds", "losses", "peak_bytes"}
    return all(keys <= row.keys() and all(samples <= each.keys() for each in row["samples"]) for row in rows)


def _row(case: Case) -> dict[str, Any]:
    return {
        **case.to_json(),
        "status": "pending",
        "reason": None,
        "predicted_bytes": None,
        "flops": None,
        "peak_flops": None,
        "peak_source": None,
        "samples": [],
    }


def _comparable(name: str, value: Any) -> Any:
    """A resumed benchmark may have other numbers of rounds."""
    return {key: each for key, each in value.items() if key != "rounds"} if name == "workload" and value else value


def case_figures(rows: Sequence[Row], micro_batch: int, seq_len: int) -> list[dict[str, Any]]:
    """Return the figures of each case; null where it has no samples.

    ``step_seconds`` is the median of all blocks, and samples and tokens per second are those of all ranks in this time.
    ``efficiency`` is the throughput of a rank over that of the same case in the smallest measured world.
    """
    smallest: dict[tuple[Any, ...], tuple[int, float]] = {}
    for row in rows:
        if seconds := _blocks_of(row, "seconds"):
            key, step = _key(row), statistics.median(seconds)
            if key not in smallest or row["world_size"] < smallest[key][0]:
                smallest[key] = (row["world_size"], step)
    found = []
    for row in rows:
        seconds = _blocks_of(row, "seconds")
        if not seconds:
            found.append(dict.fromkeys(_FIGURES))
            continue
        step = statistics.median(seconds)
        samples = row["world_size"] * micro_batch / step
        peaks = [sample["peak_bytes"] for sample in row["samples"] if sample["peak_bytes"] is not None]
        has_peak = row.get("flops") and row.get("peak_flops")
        figures = {
            "step_seconds": step,
            "step_quartiles": _quartiles(seconds),
            "cpu_step_seconds": statistics.median(_blocks_of(row, "cpu_seconds")),
            "samples_per_second": samples,
            "tokens_per_second": samples * seq_len,
            "peak_bytes": int(statistics.median(peaks)) if peaks else None,
            "efficiency": smallest[_key(row)][1] / step,
            "mfu": row["flops"] / step / row["peak_flops"] if has_peak else None,
            "loss": max(row["samples"], key=lambda sample: sample["round"])["losses"][-1],
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
                    "ratio_95": list(_median_interval(ratios)),
                    "cpu_ratio": statistics.median(theirs[1] / own[1] for own, theirs in pairs),
                    "relative_loss_difference": max(losses),
                }
            )
    return found


def _blocks_of(row: Row, name: str) -> list[float]:
    """Return a value of every measured block of a case."""
    return [value for sample in row["samples"] for value in sample[name]]


def _quartiles(values: Sequence[float]) -> list[float]:
    """Return the first and the third quartile."""
    if len(values) < 2:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def _median_interval(ratios: Sequence[float]) -> tuple[float, float]:
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


def _setting(row: Row) -> tuple[Any, ...]:
    return row["strategy"], row["version"], row["prefetch"]


def _key(row: Row) -> tuple[Any, ...]:
    return (*_setting(row), row["system"])
