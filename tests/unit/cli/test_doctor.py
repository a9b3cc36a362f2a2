"""``hf-fsdp doctor``: what it finds wrong, and its output on the installed versions."""

from __future__ import annotations

from typing import Any

import pytest

from hf_fsdp_plugin.tools.doctor.verb import check_build, check_contracts


def row(status: str, without: str) -> dict[str, Any]:
    return {"target": "torch.nn:_name", "status": status, "without": without, "use": "a test", "replaced": False}


@pytest.mark.parametrize(
    ("status", "without", "codes"),
    [
        ("holds", "refused", []),
        ("not installed", "refused", []),
        ("not in this version", "off", []),
        ("missing", "refused", ["FSDP-E620"]),
        ("missing", "off", ["FSDP-W621"]),
        ("missing", "unobservable", ["FSDP-W621"]),
        ("changed", "refused", ["FSDP-N626"]),
    ],
)
def test_missing_contract_is_a_problem_by_its_effect(status: str, without: str, codes: list[str]) -> None:
    assert [problem.code for problem in check_contracts([row(status, without)])] == codes


@pytest.mark.parametrize(
    ("version", "driver", "warns"), [("2.13.0+cpu", True, 1), ("2.13.0+cpu", False, 0), ("2.13.0", True, 0)]
)
def test_cpu_build_on_a_machine_with_a_driver_is_a_warning(version: str, driver: bool, warns: int) -> None:
    assert [problem.code for problem in check_build(version, driver)] == ["FSDP-W625"] * warns
