"""The report of a model without ranks, and the checks of the whole model."""

import pytest
from live_models import make_model, make_plan, make_unit

from hf_fsdp_plugin import SpecError, report
from hf_fsdp_plugin.observe.build import build_report, check_structure


@pytest.mark.parametrize(("subject", "code"), [("model", "FSDP-E507"), (make_model(), "FSDP-E508")])
def test_report_requires_a_prepared_model(subject: object, code: str) -> None:
    with pytest.raises(SpecError) as error:
        report(subject)
    assert [problem.code for problem in error.value.problems] == [code]


def test_model_without_units_is_not_sharded() -> None:
    found = build_report(make_model(), make_plan())
    assert "FSDP-E501" in [problem.code for problem in found.problems]
    assert (found.backend, found.num_params, found.units) == ("none", 50, ())
    assert "not sharded" in str(found)


def test_summary_is_short_and_names_errors() -> None:
    found = build_report(make_model(), make_plan())
    lines = found.summary().splitlines()
    assert lines[0].startswith("FSDP: Sequential, 50 parameters") and "memory per rank: " in found.summary()
    assert any(line.startswith("ERROR ") for line in lines) and "FSDP-E501" in found.summary()
    assert "DIFFERS  sharding.strategy: full_shard requested, not sharded observed" in lines
    assert max(map(len, lines)) <= 100 and len(found.summary()) < len(str(found))


@pytest.mark.parametrize(("num_frozen", "codes"), [(10, ["FSDP-E502"]), (20, [])])
def test_trained_units_must_have_the_master_dtype(num_frozen: int, codes: list[str]) -> None:
    plan = make_plan(fsdp_mixed_precision_policy={"param_dtype": "bf16"})
    problems = check_structure([make_unit("0"), make_unit("1", master_dtype="bf16", num_frozen=num_frozen)], plan)
    assert [problem.code for problem in problems] == codes
