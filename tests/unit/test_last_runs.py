"""``python -m scripts.last_runs``: when each set that CI does not run has run last."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import last_runs
from scripts.last_runs import SETS, RunSet, changed_since, last_run, record, state
from tests import conftest

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


@pytest.mark.parametrize(
    ("args", "options", "expected"),
    [
        (["tests/gloo"], {}, ["slow tests/gloo"]),
        (["tests"], {}, ["slow tests/gloo", "slow tests/programs", "slow tests/unit"]),
        (["tests/gloo/test_peft.py"], {}, []),
        (["tests/gloo"], {"keyword": "peft"}, []),
        (["tests/gloo"], {"markexpr": "not slow"}, []),
    ],
)
def test_whole_run_of_slow_tests_is_recorded(
    args: list[str], options: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    monkeypatch.setattr(last_runs, "record", lambda name, result: found.append(name))
    option = SimpleNamespace(**{"markexpr": "slow", "keyword": "", "collectonly": False, **options})
    session: Any = SimpleNamespace(config=SimpleNamespace(args=args, option=option), testsfailed=0)
    conftest.pytest_sessionfinish(session, 0)
    assert found == expected


def test_row_of_a_set_is_the_one_of_its_benchmark() -> None:
    assert isinstance(MERGE, RunSet) and MERGE.command == "python -m scripts.bench merge"
    assert MERGE.code == ("hf_fsdp_plugin/checkpoint", "hf_fsdp_plugin/tools/merge", "scripts/bench/measure/merge.py")
