"""Each model family trains, saves and resumes under both versions of FSDP as in one process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from tests.gloo.cases_families import NUM_STEPS, adam, plain_sgd, reference, train
from tests.support.matrices import alternating
from tests.support.model_families import FAMILIES
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config

# Attention has no fused kernel on the simulated accelerator, so more intermediate results are rounded.
RELATIVE = 2e-5 if os.environ.get("RANKS_DEVICE") == "accelerator" else 1e-5
reference_of = cache(reference)


def config_of(family: str, version: int) -> dict[str, Any]:
    layers = ",".join(FAMILIES[family].layers)
    return parallel_config("full_shard", version, 2, fsdp_transformer_layer_cls_to_wrap=layers)


def assert_close(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare names, shapes and dtypes exactly, and values relative to each tensor's norm."""
    assert {name: (w.shape, w.dtype) for name, w in weights.items()} == {
        name: (w.shape, w.dtype) for name, w in expected.items()
    }
    for name, weight in expected.items():
        distance = (weights[name].float() - weight.float()).norm() / weight.float().norm().clamp(min=1e-3)
        assert distance < RELATIVE, f"{name} is off by {distance:.1e}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A family trained on ranks with one version of FSDP, and the same steps in one process."""

    version: int
    run: dict[str, Any]
    expected: dict[str, Any]


PARAMETERS = [pytest.param(pair.values, marks=pair.marks) for pair in alternating(FAMILIES)]


@pytest.fixture(scope="module", params=PARAMETERS, ids=lambda param: f"{param[0]}-{param[1]}")
def case(two_ranks: Ranks, request: pytest.FixtureRequest) -> Case:
    """One run for each family and version, shared by the tests."""
    family, version = request.param
    run = two_ranks.run(train, family, config_of(family, version))[0]
    return Case(version=version, run=run, expected=reference_of(family))


def test_family_matches_single_process(case: Case) -> None:
    assert case.run["losses"] == pytest.approx(case.expected["losses"][:NUM_STEPS], rel=RELATIVE)
    assert case.run["norms"] == pytest.approx(case.expected["norms"][:NUM_STEPS], rel=RELATIVE)
    assert_close(case.run["saved"], case.expected["saved"])


def test_gathered_state_dict_keeps_ties(case: Case) -> None:
    assert case.run["shared"] == case.expected["shared"]


def test_all_parameters_except_scalars_are_sharded(case: Case) -> None:
    num_params, report = case.expected["num_params"], case.run["report"]
    scalars = [name for name, weight in case.expected["saved"].items() if weight.dim() == 0]
    assert sum(unit["num_params"] for unit in report["units"]) == num_params - len(scalars)
    assert sum(rank["num_local_params"] for rank in report["ranks"]) == num_params + len(scalars)
    assert case.run["unsharded"] == scalars


def test_report_has_no_differences(case: Case) -> None:
    report = case.run["report"]
    assert report["backend"] == f"fsdp{case.version}"
    assert [row for row in report["settings"] if row["status"] == "differs"] == []
    assert [problem for problem in report["problems"] if problem["severity"] != "note"] == []


def test_full_and_sharded_states_resume_exactly(case: Case) -> None:
    for resumed in case.run["resumed"].values():
        assert all(torch.equal(resumed["loaded"][name], weight) for name, weight in case.run["saved"].items())
        assert resumed["loss"] == pytest.approx(case.expected["losses"][NUM_STEPS], rel=RELATIVE)
        assert resumed["norm"] == pytest.approx(case.expected["norms"][NUM_STEPS], rel=RELATIVE)
        assert_close(resumed["weights"], case.expected["weights"])


@pytest.mark.parametrize("optimizer", [plain_sgd, adam], ids=["plain-sgd", "adam"])
@pytest.mark.parametrize("version", [1, 2])
def test_resume_adds_no_optimizer_state(two_ranks: Ranks, version: int, optimizer: Any) -> None:
    run = two_ranks.run(train, "llava", config_of("llava", version), optimizer)[0]
    assert run["num_states"] < run["num_trained"], "the last layer of the vision tower must be unused"
    assert [resumed["num_states"] for resumed in run["resumed"].values()] == [run["num_states"]] * 2
