"""The checks of the whole model, and the report of a model without ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_fsdp_plugin import SpecError, report
from hf_fsdp_plugin.observe.build import build_report, check_structure

Make = Callable[..., Any]


def codes(error: pytest.ExceptionInfo[SpecError]) -> list[str]:
    return [problem.code for problem in error.value.problems]


def test_report_of_an_unsupported_object_is_an_error() -> None:
    with pytest.raises(SpecError) as error:
        report("model")
    assert codes(error) == ["FSDP-E507"]


def test_report_of_an_unprepared_model_is_an_error(model: nn.Module) -> None:
    with pytest.raises(SpecError) as error:
        report(model)
    assert codes(error) == ["FSDP-E508"] and "Sequential" in str(error.value)


def test_model_without_units_is_not_sharded(model: nn.Module, make_plan: Make) -> None:
    found = build_report(model, make_plan())
    assert "FSDP-E501" in [problem.code for problem in found.problems]
    assert (found.backend, found.num_params, found.units) == ("none", 50, ())
    assert "not sharded" in str(found)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_master_dtype_must_be_the_planned_one(make_plan: Make, make_unit: Make, dtype: str) -> None:
    plan = make_plan(fsdp_mixed_precision_policy={"param_dtype": "bf16"})
    problems = check_structure([make_unit("0"), make_unit("1", master_dtype=dtype)], plan)
    assert [problem.code for problem in problems] == (["FSDP-E502"] if dtype == "bf16" else [])
    assert all("example 1" in problem.message for problem in problems)


def test_frozen_units_may_have_another_dtype(make_plan: Make, make_unit: Make) -> None:
    plan = make_plan(fsdp_mixed_precision_policy={"param_dtype": "bf16"})
    assert check_structure([make_unit("0", master_dtype="bf16", num_frozen=20)], plan) == []


def test_report_is_written_as_json(model: nn.Module, make_plan: Make, tmp_path: Any) -> None:
    found = build_report(model, make_plan(), optimizer=torch.optim.SGD(model.parameters()))
    assert found.write(tmp_path / "new" / "report.json") == tmp_path / "new" / "report.json"
    with pytest.raises(OSError):
        found.write(tmp_path / "new" / "report.json" / "below_a_file")
