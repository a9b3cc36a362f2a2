"""``hf-fsdp doctor``: what it finds wrong, and its output on the installed versions."""

from __future__ import annotations

from typing import Any

import pytest

from hf_fsdp_plugin.tools.doctor.verb import check_builds, check_contracts


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
    ("versions", "cuda", "driver", "codes"),
    [
        ({"torch": "2.13.0+cpu"}, None, False, []),
        ({"torch": "2.13.0+cpu"}, None, True, ["FSDP-W625"]),
        ({"torch": "2.15.0"}, "13.2", True, []),
        ({"torch": "2.15.0+cu132", "torchvision": "0.30.0+cu132"}, "13.2", True, []),
        ({"torch": "2.15.0+cu132", "torchvision": "0.30.0+cpu"}, "13.2", True, ["FSDP-W625"]),
    ],
)
def test_builds_that_do_not_fit_are_warnings(versions: Any, cuda: str | None, driver: bool, codes: list[str]) -> None:
    assert [problem.code for problem in check_builds(versions, cuda, driver)] == codes
