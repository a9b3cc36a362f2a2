"""``python -m scripts.last_runs``: when each set that CI does not run has run last."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

import pytest

from scripts import last_runs, slow_tests
from scripts.last_runs import SETS, RunSet, changed_since, last_run, record, state
from scripts.slow_tests import in_order, summary

ROOT = Path(__file__).parents[2]
TODAY = datetime.date(2026, 6, 30)
MERGE = next(row for row in SETS if row.name == "merge")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(last_runs, "last_run", lambda name: last_run(name, tmp_path))
    return tmp_path


def test_code_of_every_set_exists() -> None:
    assert [path for row in SETS for path in row.code if not (ROOT / path).exists()] == []


def test_names_of_sets_differ() -> None:
    assert len({row.name for row in SETS}) == len(SETS)


def test_set_without_a_run_is_stale(results: Path) -> None:
    assert state(MERGE, [], TODAY) == ("never", "has never run")


@pytest.mark.parametrize(("date", "reason"), [("2026-06-01", ""), ("2026-05-01", "ran 60 days ago")])
def test_set_is_stale_after_30_days(results: Path, date: str, reason: str) -> None:
    (results / "merge.json").write_text(json.dumps({"date": date, "commit": "abc"}))
    assert state(MERGE, [], TODAY)[1] == reason


def test_set_is_stale_after_a_change_of_its_code(results: Path) -> None:
    (results / "merge.json").write_text(json.dumps({"date": "2026-06-20"}))
    changes = [
        ("2026-06-21T10:00:00+00:00", "hf_fsdp_plugin/tools/merge/merging.py"),
        ("2026-06-21T10:00:00+00:00", "hf_fsdp_plugin/checkpoint_other.py"),
        ("2026-06-20T10:00:00+00:00", "hf_fsdp_plugin/checkpoint/names.py"),
    ]
    assert state(MERGE, changes, TODAY)[1] == "1 files of its code have changed"
    assert changed_since(MERGE, "2026-06-20T09:00:00+00:00", changes) == {changes[0][1], changes[2][1]}


def test_oldest_part_of_a_result_counts(results: Path) -> None:
    parts = {"date": "2026-06-20", "cells": [{"date": "2026-01-01"}, {"date": "2026-06-20"}]}
    (results / "matrix.json").write_text(json.dumps(parts))
    assert last_run("matrix", results).date == "2026-01-01"  # type: ignore[union-attr]


def test_failed_run_is_stale_and_replaces_an_older_result(results: Path) -> None:
    (results / "merge.json").write_text(json.dumps({"date": "2026-01-01"}))
    record("merge", "failed", results / "last_runs.json")
    run = last_run("merge", results)
    assert run is not None and run.result == "failed" and run.date[:10] > "2026-01-01"
    assert state(MERGE, [], datetime.date.fromisoformat(run.date[:10]))[1] == "failed"


def test_unknown_set_is_not_recorded(results: Path) -> None:
    with pytest.raises(KeyError):
        record("nothing", "passed", results / "last_runs.json")


def test_notice_names_the_command(results: Path) -> None:
    assert f"{len(SETS)} of {len(SETS)} sets" in last_runs.notice()


RUNS = {
    "old.py": {"date": "2026-01-01", "result": "3 passed"},
    "new.py": {"date": "2026-06-01", "result": "1 failed, 3 passed"},
    "newest.py": {"date": "2026-06-02", "result": "3 passed, 1 skipped"},
}


def test_slow_files_run_in_the_order_of_their_urgency() -> None:
    assert in_order(["newest.py", "old.py", "new.py", "never.py"], RUNS) == [
        "never.py",
        "new.py",
        "old.py",
        "newest.py",
    ]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["old.py", "newest.py"], "passed"),
        (["old.py", "new.py"], "new.py failed"),
        (["new.py", "never.py", "other.py"], "new.py failed; 2 files have never run"),
    ],
)
def test_result_of_all_slow_files(files: list[str], expected: str) -> None:
    assert summary(files, RUNS) == expected


def test_result_of_a_set_is_read_from_its_file(results: Path) -> None:
    (results / "slow_tests.json").write_text(json.dumps({"result": "new.py failed", "files": RUNS}))
    row = next(row for row in SETS if row.name == "slow_tests")
    assert state(row, [], datetime.date(2026, 1, 10)) == ("2026-01-01 -          new.py failed", "new.py failed")


def test_failed_slow_test_is_recorded(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = results / "tests"
    folder.mkdir()
    (folder / "conftest.py").write_text(
        "def pytest_configure(config):\n    config.addinivalue_line('markers', 'slow: long')\n"
    )
    for name, check in (("right", "True"), ("wrong", "False")):
        (folder / f"test_{name}.py").write_text(
            f"import pytest\n\n@pytest.mark.slow\ndef test_slow():\n    assert {check}\n\n"
            "def test_quick():\n    assert False\n"
        )
    monkeypatch.setattr(slow_tests, "ROOT", results)
    monkeypatch.setattr(slow_tests, "FILE", results / "slow_tests.json")
    monkeypatch.setattr(sys, "argv", ["slow_tests", "--workers", "1"])
    assert slow_tests.main() == 1
    tree = json.loads((results / "slow_tests.json").read_text())
    assert tree["result"] == "tests/test_wrong.py failed"
    assert {file: row["result"] for file, row in tree["files"].items()} == {
        "tests/test_right.py": "1 passed, 1 deselected",
        "tests/test_wrong.py": "1 failed, 1 deselected",
    }


def test_row_of_a_set_is_the_one_of_its_benchmark() -> None:
    assert isinstance(MERGE, RunSet) and MERGE.command == "python -m scripts.bench merge"
    assert MERGE.code == ("hf_fsdp_plugin/checkpoint", "hf_fsdp_plugin/tools/merge", "scripts/bench/measure/merge.py")
