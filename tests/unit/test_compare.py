"""``scripts/bench/tables/compare.py``: which figures count as worse, and what it reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.tables import compare
from scripts.bench.tables.directions import direction_of

ROOT = Path(__file__).parents[2]


def worse(old: Any, new: Any, threshold: float = 0.1) -> list[str]:
    changes, unknown = compare.compare("a.json", old, new, threshold)
    assert unknown == []
    return [change.name for change in changes if change.relative > 0]


@pytest.mark.parametrize("path", sorted((ROOT / "docs/results").glob("*.json")), ids=lambda path: path.stem)
def test_every_figure_of_the_results_has_a_direction(path: Path) -> None:
    names = [name for name, _ in compare.figures_of(json.loads(path.read_text()))]
    assert [name for name in names if direction_of(name) is None] == []
    assert len(names) == len(set(names))
    assert not names or any(direction_of(name).better != "not compared" for name in names)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("key", "increase_is_worse"),
    [
        ("seconds", True),
        ("peak_bytes", True),
        ("tokens_per_second", False),
        ("samples_per_second", False),
        ("efficiency", False),
        ("largest_relative_difference", True),
        ("times_as_fast_as_stock", False),
        ("ratio_median", True),
    ],
)
def test_direction_decides_what_is_worse(key: str, increase_is_worse: bool) -> None:
    less, more = {key: 1.0}, {key: 2.0}
    assert worse(less, more) == ([key] if increase_is_worse else [])
    assert worse(more, less) == ([] if increase_is_worse else [key])


def test_figures_of_a_gpu_check_have_directions() -> None:
    figures = {
        "tokens_per_second": {"plugin": 10.0, "stock": 9.0}, "times_as_fast_as": {"stock": 1.1},
        "waits": {"plugin": [0, 0], "stock": [0, 1]}, "errors": {"allocated": 0.01}, "peak_bytes": 5,
        "second_stall_seconds": 0.1, "gb_per_second": {"plugin": 2.0}, "stock_seconds": 3.0, "visible": 1,
    }  # fmt: skip
    old = {"rows": [{"name": "check", "version": 2, "ranks": 1, "figures": figures}]}
    changed = {"tokens_per_second": {"plugin": 5.0, "stock": 1.0}, "second_stall_seconds": 0.2, "stock_seconds": 9.0}
    new = {"rows": [{**old["rows"][0], "figures": {**figures, **changed}}]}
    assert sorted(name.partition("/figures/")[2] for name in worse(old, new)) == [
        "second_stall_seconds", "tokens_per_second/plugin",
    ]  # fmt: skip


def test_error_is_compared_by_its_size() -> None:
    assert worse({"median_error": 0.1}, {"median_error": -0.3}) == ["median_error"]
    assert worse({"median_error": -0.3}, {"median_error": 0.1}) == []


def test_change_within_the_threshold_or_spread_does_not_count() -> None:
    assert worse({"seconds": 1.0}, {"seconds": 1.09}) == []
    assert worse({"seconds": 1.0}, {"seconds": 1.09}, threshold=0.05) == ["seconds"]
    assert worse({"seconds": [1.0, 1.5, 2.0]}, {"seconds": [1.7, 1.8, 1.9]}) == []
    assert worse({"seconds": [1.0, 1.01, 1.02]}, {"seconds": [1.7, 1.8, 1.9]}) == ["seconds"]
    wide, narrow = {"ratio": 1.0, "lowest": 0.5, "highest": 2.0}, {"ratio": 1.5, "lowest": 1.4, "highest": 1.6}
    assert worse(wide, narrow) == []
    assert worse({**wide, "lowest": 0.9, "highest": 1.1}, narrow) == ["ratio"]
    assert worse({"seconds": 0.001}, {"seconds": 0.004}) == []  # below the floor


def test_rows_are_matched_by_what_identifies_them() -> None:
    old = {"cases": [{"case": "a", "seconds": 1.0}, {"case": "b", "seconds": 5.0}]}
    new = {"cases": [{"case": "b", "seconds": 5.0}, {"case": "c", "seconds": 9.0}, {"case": "a", "seconds": 2.0}]}
    assert worse(old, new) == ["cases/a/seconds"]


def test_figure_without_a_direction_is_named() -> None:
    assert compare.compare("a.json", {"strange": 1}, {"strange": 2}, 0.1) == ([], ["strange"])


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.bench.tables.compare", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_exit_code_is_1_if_a_figure_is_worse(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text('{"seconds": 1.0, "machine": "a"}')
    new.write_text('{"seconds": 2.0, "machine": "b"}')
    done = run(old, new)
    assert (
        done.returncode == 1 and "seconds: 1 → 2 (+1, 100.0% worse)" in done.stdout and "machine differ" in done.stderr
    )
    assert run(new, old).returncode == 0
    assert "better:" in run(new, old, "--all").stdout
    assert run(old, new, "--threshold", 150).returncode == 0


def test_folders_and_revisions_are_compared() -> None:
    done = run("HEAD", "docs/results")
    assert done.returncode in (0, 1) and "results compared" in done.stdout


@pytest.mark.parametrize("place", ["none", "README.md"])
def test_unreadable_place_exits_2(place: str) -> None:
    done = run(place, "docs/results")
    assert done.returncode == 2 and done.stderr.startswith("compare.py: ")
