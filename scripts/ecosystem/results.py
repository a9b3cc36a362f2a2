"""Runs cases, and keeps their results in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.bench.common import describe_machine
from scripts.ecosystem import grouped
from scripts.ecosystem.cases import CASES
from scripts.ecosystem.checks import (
    check_model,
    check_report,
    compare_numbers,
    compare_weights,
    read_error,
    read_numbers,
)
from scripts.ecosystem.grouped import BEHAVIORS, Behavior
from scripts.ecosystem.model import OWN_CHECKS, TWO_PROCESSES, Case
from scripts.ecosystem.runs import Run, Suite, run_reference, run_sharded, script_words

Row = dict[str, Any]
WORKS, REFUSED, FAILS, SKIPPED = "works", "refused", "fails", "skipped"


def run_case(case: Case, suite: Suite, fsdp_version: int) -> Row:
    """Run a case under one FSDP version, compare it, and return its row."""
    row: Row = {"case": case.name, "package": case.package, "script": case.script, "version": fsdp_version}
    row |= {"compared": case.compared, "note": case.note}
    missing = find_missing(case, suite)
    if missing:
        return {**row, "status": SKIPPED, "detail": missing}
    run = run_sharded(case, suite, fsdp_version)
    row["seconds"] = run.seconds
    if run.code != 0:
        detail, code = read_error(run)
        # A problem code alone is no refusal: an error while saving has one too.
        refused = bool(code) and code == case.refused.get(fsdp_version)
        return {**row, "status": REFUSED if refused else FAILS, "detail": detail, "code": code}
    faults, measured = check_run(case, suite, run)
    return {**row, **measured, "status": FAILS if faults else WORKS, "detail": "; ".join(faults)}


def run_behaviors(behaviors: list[Behavior], suite: Suite, fsdp_versions: Iterable[int]) -> list[Row]:
    """Run behaviors under FSDP versions, each in one start of the ranks, compare them, and return their rows."""
    possible = [behavior for behavior in behaviors if not grouped.find_missing(behavior)]
    reference = grouped.run_behaviors(possible, suite, None)
    rows = []
    for fsdp_version in fsdp_versions:
        ours = grouped.run_behaviors(possible, suite, fsdp_version)
        rows += [behavior_row(behavior, fsdp_version, ours, reference) for behavior in behaviors]
    return rows


def behavior_row(behavior: Behavior, fsdp_version: int, ours: Path, reference: Path) -> Row:
    """Return the row of a behavior that has run in the folders `ours` and `reference`."""
    row: Row = {"case": behavior.name, "package": behavior.group, "script": f"behaviors/{behavior.group}.py"}
    row |= {"group": behavior.group, "version": fsdp_version, "compared": TWO_PROCESSES, "note": ""}
    if missing := grouped.find_missing(behavior):
        return {**row, "status": SKIPPED, "detail": missing}
    if error := grouped.read_failure(ours / "behaviors" / behavior.key):
        code = grouped.read_code(ours / "behaviors" / behavior.key)
        refused = bool(code) and code == behavior.refused.get(fsdp_version)
        return {**row, "status": REFUSED if refused else FAILS, "detail": error, "code": code}
    faults, measured = grouped.compare(behavior, ours, reference)
    return {**row, **measured, "status": FAILS if faults else WORKS, "detail": "; ".join(faults)}


def find_missing(case: Case, suite: Suite) -> str:
    """Return why a case cannot run here, or an empty string."""
    for package in case.packages:
        if package not in ("-", "python") and find_spec(package) is None:
            return f"{package} is not installed"
    for name in ("transformers", "accelerate"):
        if f"{{{name}}}" in case.script and getattr(suite, name) is None:
            return f"--{name}-examples is not given"
    path = Path(script_words(case, suite)[-1])
    if path.suffix != ".py":
        return ""
    if not path.exists():
        return f"{path.name} does not exist"
    # Removed in Accelerate 1.15, but still in some of the examples.
    return f"{path.name} needs DistributedType.TPU" if "DistributedType.TPU" in path.read_text("utf-8") else ""


def check_run(case: Case, suite: Suite, run: Run) -> tuple[list[str], Row]:
    """Return what is wrong with a run that exited with 0, and what was measured."""
    faults = check_report(run) if case.sharded else []
    measured: Row = {}
    saved = run.out / case.saved
    if case.model:
        faults += check_model(case.model, saved, run.out)
    if case.compared == OWN_CHECKS:
        return faults, measured
    reference = run_reference(case, suite)
    if reference.code != 0:
        return [*faults, f"the reference fails: {read_error(reference)[0]}"], measured
    numbers = read_numbers(reference)
    difference, found = compare_numbers(read_numbers(run), numbers, case.tolerance)
    measured |= {"numbers": len(numbers), "loss_difference": difference}
    faults += found[:3]
    if case.model:
        start = suite.assets / "models" / case.start if case.start else None
        weights, found = compare_weights(saved, reference.out / case.saved, start, case.weights)
        measured["weight_difference"] = weights
        faults += found[:3]
    elif not numbers:
        faults.append("nothing was compared: no numbers and no model")
    return faults, measured


def is_expected(case: Case | Behavior, row: Row) -> bool:
    """Return whether a row is what the case expects. Skipped cases are."""
    if row["status"] == SKIPPED:
        return True
    wanted = case.refused.get(row["version"])
    return row["status"] == (WORKS if wanted is None else REFUSED)


def select(cases: Iterable[Any], words: list[str]) -> list[Any]:
    """Return the cases whose name contains one of the words, or is one of them if it is given with ``=``."""
    if not words:
        return list(cases)
    return [c for c in cases if any(c.name == w[1:] if w.startswith("=") else w in c.name for w in words)]


def merge_rows(path: Path, rows: list[Row]) -> list[Row]:
    """Return the rows in `path` with new ones put in, in the order of the cases. A skip replaces no result."""
    known = json.loads(path.read_text())["cases"] if path.exists() else []
    merged = {(row["case"], row["version"]): row for row in known}
    for row in rows:
        key = (row["case"], row["version"])
        if row["status"] != SKIPPED or key not in merged:
            merged[key] = row
    order = {case.name: number for number, case in enumerate([*CASES, *BEHAVIORS])}
    kept = [row for row in merged.values() if row["case"] in order]
    return sorted(kept, key=lambda row: (order[row["case"]], row["version"]))


def write_rows(path: Path, rows: list[Row]) -> None:
    """Merge rows into the result file."""
    machine = describe_machine()
    for name in ("trl", "peft", "bitsandbytes", "sentence-transformers"):
        try:
            machine["versions"][name] = version(name)
        except PackageNotFoundError:
            continue
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {**machine, "command": "bash scripts/ecosystem.sh", "cases": merge_rows(path, rows)}
    path.write_text(json.dumps(result, indent=2) + "\n")
