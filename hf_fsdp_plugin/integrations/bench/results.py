"""The file of a benchmark: cases with their samples, and the figures that are computed from them. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.integrations.bench.cases import Case
from hf_fsdp_plugin.integrations.bench.figures import case_figures, comparisons_of
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.version import SCHEMA_VERSION

KIND: Final = "hf-fsdp bench"
_SAME: Final = ("model", "workload", "settings", "device", "threads")
"""What a benchmark must have in common with the file that it continues."""


class Results:
    """The results of one benchmark and their file, which is complete at any time.

    Args:
        path: ``None`` if no file is written.
        head: what the benchmark measures, as JSON.
        cases: every case, in the order of the tables.
    """

    def __init__(self, path: Path | None, head: Mapping[str, Any], cases: Iterable[Case]) -> None:
        self._path, self._head = path, dict(head)
        self._rows: dict[str, dict[str, Any]] = {case.name: _row(case) for case in cases}

    @property
    def path(self) -> Path | None:
        return self._path

    def resume(self, tree: Mapping[str, Any]) -> None:
        """Take over the measured rounds of a file that :func:`read_results` has read.

        Raises:
            SpecError: the file is of another benchmark (FSDP-E785).
        """
        other = [name for name in _SAME if _comparable(name, tree.get(name)) != _comparable(name, self._head[name])]
        if other:
            message = f"{self._path} is the result of another benchmark: its {' and '.join(other)} differ."
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

    def predict(self, name: str, num_bytes: int | None) -> None:
        self._rows[name]["predicted_bytes"] = num_bytes

    def set_flops(self, name: str, flops: float | None, peak: float | None) -> None:
        """Set the model's FLOPs of a step of one rank, and the peak FLOP/s of its device."""
        self._rows[name] |= {"flops": flops, "peak_flops": peak}

    def row(self, name: str) -> Mapping[str, Any]:
        return self._rows[name]

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
        if self._path is None:
            return
        staging = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            staging.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
            staging.replace(self._path)
        except OSError as error:
            message = f"cannot write {self._path}: {error.strerror or error}."
            fix = "Choose a file in a folder that exists, is writable and has space, with -o."
            raise SpecError([Problem(code="FSDP-E789", message=message, fix=fix)]) from error
        finally:
            with contextlib.suppress(OSError):
                staging.unlink(missing_ok=True)


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
