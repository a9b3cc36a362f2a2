"""The tables of the printed report."""

from typing import Any

import pytest

from hf_fsdp_plugin.observe.report import (
    MemoryRow,
    memory_table,
    problem_lines,
    settings_table,
    status_line,
    units_table,
)
from hf_fsdp_plugin.observe.units import HELD
from hf_fsdp_plugin.problems import Problem
from tests.unit.observe.live_models import make_unit


def row(name: str, **facts: Any) -> dict[str, Any]:
    return {"setting": name, "asked": 1, "planned": 1, "observed": 1, "status": "applied", "reason": "", **facts}


def unit(name: str, **facts: Any) -> dict[str, Any]:
    return make_unit(name, **facts).to_json()


def test_units_that_differ_in_a_number_share_a_row() -> None:
    units = [unit(f"model.layers.{index}") for index in range(3)] + [unit("", num_frozen=5)]
    lines = units_table(units).splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("model.layers.0–2") and "Block ×3" in lines[1]
    assert lines[2].startswith("(root)") and lines[2].endswith("5 frozen")


def test_units_that_differ_in_a_fact_have_separate_rows() -> None:
    units = [unit("layers.0"), unit("layers.1", checkpointed=True)]
    assert [line.split()[0] for line in units_table(units).splitlines()] == ["unit", "layers.0", "layers.1"]


def test_memory_of_different_ranks_is_a_range() -> None:
    names = [*HELD, *(f"ddp_{name}" for name in HELD), "peak_bytes", "ddp_bytes"]
    small, large = (MemoryRow(dict.fromkeys(names, size), peak_source="process resident set") for size in (1024, 2048))
    table = memory_table([small, large], small)
    assert "1.0 KiB to 2.0 KiB" in table and "3.0 KiB to 6.0 KiB" in table and "peak (process resident set)" in table


def test_settings_table_shows_reasons_of_differing_settings() -> None:
    lines = settings_table(
        [
            row("mesh.shard", asked="auto", planned=2, observed=2),
            row("params.use_orig", asked=False, observed=True, status="differs", reason="because"),
            row("launch.debug", status="unobservable", reason="launcher"),
        ]
    ).splitlines()
    assert "auto → 2" in lines[1] and lines[1].endswith("applied")
    assert "DIFFERS" in lines[2] and lines[3].strip() == "because"
    assert lines[4].endswith("debug") and len(lines) == 5


def test_status_line_counts_and_names_what_differs() -> None:
    rows = [row("mesh.shard"), row("launch.debug", status="unobservable")]
    assert status_line(rows) == "settings: 1 applied, 1 unobservable, none differs"
    rows.append(row("params.use_orig", status="differs"))
    assert status_line(rows).endswith("1 DIFFER from the requested value: params.use_orig")


@pytest.mark.parametrize("differing", [set(), {"mesh.shard"}])
def test_only_warnings_of_differing_settings_are_printed(differing: set[str]) -> None:
    problems = [
        Problem(code="FSDP-W506", setting="mesh.shard", message="from the plan"),
        Problem(code="FSDP-W506", setting="mesh.shard", message="from the live model"),
        Problem(code="FSDP-E501", message="nothing is sharded"),
    ]
    text = problem_lines(problems, differing)
    assert "FSDP-E501" in text and "from the plan" not in text
    assert ("from the live model" in text) == ("1 setting differs" in text) == bool(differing)
    assert ("2 other warnings" in text) == (not differing)
