"""The harness of other libraries' suites: outcomes, their comparison, the reasons, and the committed results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.peers.outcomes import compare, count, explain, read_outcomes, table, unexplained
from scripts.run_peers import INSIDE, RESULT, ROOT, Suite, checkout_version, compare_file, read_suites, select

DIFFERENCE = {"test": "tests/a.py::T::test_x[b-1]", "without": "passed", "with": "failed (ValueError)", "message": "…"}


def write(path: Path, *rows: tuple[str, str]) -> Path:
    path.write_text("".join(json.dumps({"test": t, "outcome": o, "message": o}) + "\n" for t, o in rows))
    return path


def test_worst_report_of_a_test_is_its_outcome(tmp_path: Path) -> None:
    rows = [
        ("a", "begun"),
        ("a", "failed (KeyError)"),
        ("a", "passed"),
        ("b", "begun"),
        ("b", "passed"),
        ("c", "begun"),
    ]
    found = read_outcomes(write(tmp_path / "outcomes", *rows))
    assert {test: outcome for test, (outcome, _) in found.items()} == {
        "a": "failed (KeyError)",
        "b": "passed",
        "c": "not finished",
    }
    assert count(found) == {"passed": 1, "not finished": 1, "failed": 1}
    assert read_outcomes(tmp_path / "absent") == {}


def test_differences_are_outcomes_and_types_of_errors() -> None:
    without = {"same": ("passed", ""), "fails": ("passed", ""), "other": ("failed (A)", "a"), "gone": ("skipped", "")}
    other = {
        "same": ("passed", ""),
        "fails": ("failed (A)", "why"),
        "other": ("failed (B)", "b"),
        "new": ("passed", ""),
    }
    found = {row["test"]: (row["without"], row["with"], row["message"]) for row in compare(without, other)}
    assert found == {
        "fails": ("passed", "failed (A)", "why"),
        "other": ("failed (A)", "failed (B)", "b"),
        "gone": ("skipped", "not run", ""),
        "new": ("not run", "passed", ""),
    }


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("tests/a.py::T::test_x[b-1]: passed -> failed (ValueError)", True),
        ("tests/a.py::*: passed -> failed (ValueError)", True),
        ("*: passed -> *", True),
        ("tests/a.py::T::test_x[b-1]", False),
        ("tests/a.py::*: failed (RuntimeError) -> passed", False),
        ("tests/a.py::T::test_x?b-1]: passed -> failed (ValueError)", False),
    ],
)
def test_reason_is_found_by_test_and_outcomes(pattern: str, matches: bool) -> None:
    assert explain(DIFFERENCE, {"tests/b.py::*": "other", pattern: "reason"}) == ("reason" if matches else "")


def test_file_that_does_not_end_is_a_difference() -> None:
    run: dict[str, Any] = {"outcomes": {"a": ("passed", "")}, "ended": True, "code": 0, "seconds": 1}
    assert compare_file({"without": run, "with": run})["differences"] == []
    no_tests = {**run, "outcomes": {}, "code": 5}
    assert compare_file({"without": no_tests, "with": no_tests})["differences"] == []
    for broken in ({**run, "ended": False}, {**run, "outcomes": {}, "code": 4}):
        assert "(file)" in [row["test"] for row in compare_file({"without": run, "with": broken})["differences"]]


def test_missing_files_are_selected() -> None:
    suite = Suite(files=["tests/a.py", "tests/b.py", "tests/c.py"], explained={"known: *": "reason"})
    known = {
        "tests/a.py": {"differences": []},
        "tests/b.py": {"differences": [DIFFERENCE]},
        "tests/c.py": {"differences": [{**DIFFERENCE, "test": "known"}]},
    }
    assert select(suite.files, known, suite, [], True) == ["tests/b.py"]
    assert select(suite.files, {}, suite, [], True) == suite.files
    assert select(suite.files, known, suite, ["c.py"], False) == ["tests/c.py"]


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("src/peer/__init__.py", '__version__ = "1.2.3"\n', "1.2.3"),
        ("setup.py", 'setup(\n    version="5.0.0.dev0",  # next\n', "5.0.0.dev0"),
        ("VERSION", "1.9.0\n", "1.9.0"),
        ("README.md", "1.9.0\n", "unknown"),
    ],
)
def test_version_of_a_checkout_is_read(tmp_path: Path, file: str, text: str, expected: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert checkout_version(tmp_path, "peer") == expected


def test_process_without_the_plugin_ends(tmp_path: Path) -> None:
    (tmp_path / "hf_fsdp_plugin.py").write_text("raise ImportError('broken')\n")
    environment = {"PYTHONPATH": f"{INSIDE}:{tmp_path}", "PEERS_WITH_PLUGIN": "1"}
    done = subprocess.run([sys.executable, "-c", "print('ran')"], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (70, b"")


def test_table_counts_explained_differences() -> None:
    cell = {"checkout": "1.0", "without": {"passed": 3, "failed": 1}, "with": {"passed": 2, "failed": 2}}
    results = {"peer": {"installed": "1.1", "files": {"tests/a.py": {**cell, "differences": [DIFFERENCE]}}}}
    assert "| peer | 1.0 | 1.1 | 1 | 3 | 2 | 1 | 0 | 1 | 0 |" in table(results, {})
    assert unexplained(results, {}) == [f"peer {DIFFERENCE['test']}"]
    explained = {"peer": {"tests/a.py::*: passed -> *": "Refused on purpose."}}
    assert "| 1 | 1 |\n\n- Refused on purpose. (1 test)" in table(results, explained)
    assert unexplained(results, explained) == []


def test_committed_results_are_explained_and_shown() -> None:
    suites, _ = read_suites()
    results = json.loads(RESULT.read_text("utf-8"))["suites"]
    explained = {name: suite.explained for name, suite in suites.items()}
    assert unexplained(results, explained) == []
    assert table(results, explained) in (ROOT / "docs" / "compatibility.md").read_text("utf-8")
    for name, suite in suites.items():
        rows = [row for cell in results.get(name, {"files": {}})["files"].values() for row in cell["differences"]]
        unused = {pattern for pattern in suite.explained if not any(explain(row, {pattern: "used"}) for row in rows)}
        assert not unused, f"{name}: no difference has these reasons: {unused}"
