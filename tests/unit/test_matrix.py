"""The matrix of versions: its file, the choice of cells, the counts of tests, and the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_fsdp_plugin.supported import SUPPORTED, release_of
from scripts.run_matrix import QUICKSTART, Matrix, count_tests, select, summary, table, write_document

ROOT = Path(__file__).parents[2]
SMALL = Matrix(
    combinations={"old": {"torch": "2.11.0"}, "new": {"torch": "2.15.0"}},
    subjects={"trainer": ["tests/gloo/test_trainer.py"]},
)
RESULTS = {
    "old": {
        "versions": {"torch": "2.11.0"},
        "cells": {
            "trainer": {"ok": True, "passed": 7, "date": "2026-11-24"},
            QUICKSTART: {"ok": False, "reason": "…", "seconds": 3, "date": "2026-11-25"},
        },
    }
}


def test_file_covers_the_supported_versions() -> None:
    matrix = Matrix.read()
    assert len(matrix.combinations) >= 8
    for library in ("torch", "transformers", "accelerate"):
        found = sorted(release_of(row[library])[:2] for row in matrix.combinations.values())
        assert [".".join(map(str, release)) for release in (found[0], found[-1])] == list(SUPPORTED[library])
    for arguments in matrix.subjects.values():
        assert all((ROOT / path).exists() for path in arguments)


@pytest.mark.parametrize(
    ("only", "subjects", "missing", "chosen"),
    [
        ([], [], False, [("old", "trainer"), ("old", QUICKSTART), ("new", "trainer"), ("new", QUICKSTART)]),
        (["new"], [], False, [("new", "trainer"), ("new", QUICKSTART)]),
        ([], ["trainer"], True, [("new", "trainer")]),
        (["old"], [], True, [("old", QUICKSTART)]),
    ],
)
def test_cells_are_selected(only: list[str], subjects: list[str], missing: bool, chosen: list[tuple[str, str]]) -> None:
    assert select(SMALL, RESULTS, only, subjects, missing) == chosen


def test_tests_are_counted() -> None:
    xml = (
        '<testsuites><testsuite><testcase classname="tests.a" name="one"/><testcase classname="tests.a" name="two">'
        '<failure/></testcase><testcase classname="tests.a" name="three"><skipped/></testcase>'
        '<testcase classname="tests.b.c" name="four" time="1.6"/></testsuite></testsuites>'
    )
    failed = {"ok": False, "passed": 1, "skipped": 1, "failed": ["a::two"], "seconds": 0}
    assert count_tests(xml, ["tests/a.py"]) == failed
    assert count_tests(xml, ["tests/b"]) == {"ok": True, "passed": 1, "skipped": 0, "failed": [], "seconds": 2}
    assert not count_tests(xml, ["tests/absent.py"])["ok"]


def test_table_shows_each_cell(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    document.write_text("before\n<!-- results:begin matrix -->\n<!-- results:end matrix -->\nafter\n")
    write_document(SMALL, RESULTS, document)
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("<!-- results:end matrix -->\nafter\n")
    assert (
        "| 2.11.0 |  |  |  |  | 2026-11-24 | 7 | **failed** |" in table(SMALL, RESULTS)
        and table(SMALL, RESULTS) in text
    )
    assert summary(SMALL, RESULTS).startswith("1 of 4 cells are green: 2 combinations, 7 tests")
