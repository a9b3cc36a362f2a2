"""The report of a model without ranks, and the checks of the whole model."""

import json
from dataclasses import replace

import pytest

from hf_fsdp_plugin import SpecError, report
from hf_fsdp_plugin.observe import report_builder
from hf_fsdp_plugin.observe.report_builder import build_report, check_structure
from hf_fsdp_plugin.problems import Problem
from tests.support.call_counts import calls_of
from tests.unit.observe.live_models import make_model, make_plan, make_unit


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


def test_attributes_of_the_report_are_the_values_of_its_json() -> None:
    found = build_report(make_model(), make_plan())
    tree = json.loads(json.dumps(found.to_json()))
    names = ("backend", "model_class", "world_size", "mesh", "device", "num_params", "memory", "training", "versions")
    assert {name: getattr(found, name) for name in names} == {name: tree[name] for name in names}
    assert list(found.settings) == tree["settings"] and list(found.ranks) == tree["ranks"]
    assert found.differing and {row.status for row in found.differing} == {"differs"}
    assert found.memory.held_bytes == found.memory.params_bytes + found.memory.grads_bytes
    assert found.ranks[0].peak_source == found.memory.peak_source and found.training.steps == 0
    with pytest.raises(AttributeError, match="peak_bytes"):
        found.memory.peek_bytes  # noqa: B018


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


@pytest.mark.parametrize("equal", [True, False])
def test_merging_ranks_is_linear(monkeypatch: pytest.MonkeyPatch, equal: bool) -> None:
    """Each made-up rank has ten problems, which are its own or the same on all ranks."""

    def merge(num_ranks: int) -> int:
        common = [Problem(code="FSDP-W506", message=f"{number}") for number in range(10)]
        own = [
            [replace(problem, message=f"{problem.message} {rank}") for problem in common] for rank in range(num_ranks)
        ]
        ranks = [((), common if equal else found) for found in own]
        monkeypatch.setattr(report_builder, "gather_objects", lambda _: ranks)
        (_, problems), calls = calls_of(lambda: report_builder._merge_ranks((), common))
        assert len(problems) == (10 if equal else 10 * num_ranks)
        return calls

    assert merge(1024) < 4.4 * merge(256)
