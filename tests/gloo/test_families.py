"""Every model family trains, saves and resumes with both versions of FSDP as in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from cases_families import NUM_STEPS, adam, plain_sgd, reference, train
from families import TRAINED
from ranks import Ranks
from tiny import parallel_config

RELATIVE = 1e-5
reference_of = cache(reference)


def config_of(family: str, version: int) -> dict[str, Any]:
    layers = ",".join(TRAINED[family].layers)
    return parallel_config("full_shard", version, 2, fsdp_transformer_layer_cls_to_wrap=layers)


def assert_close(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare names, shapes and dtypes exactly, and values relative to each tensor's norm."""
    assert {name: (w.shape, w.dtype) for name, w in weights.items()} == {
        name: (w.shape, w.dtype) for name, w in expected.items()
    }
    for name, weight in expected.items():
        distance = (weights[name].float() - weight.float()).norm() / weight.float().norm().clamp(min=1e-3)
        assert distance < RELATIVE, f"{name} is off by {distance:.1e}"


Run = Callable[[str, int], dict[str, Any]]
EACH = [pytest.mark.parametrize("version", [1, 2]), pytest.mark.parametrize("family", TRAINED)]


@pytest.fixture(scope="module")
def run_of(two_ranks: Ranks) -> Run:
    """One parallel run per family and version, shared by the tests."""
    return cache(lambda family, version: two_ranks.run(train, family, config_of(family, version))[0])


def each(test: Any) -> Any:
    for mark in EACH:
        test = mark(test)
    return test


@each
def test_family_trains_as_in_one_process(run_of: Run, family: str, version: int) -> None:
    run, expected = run_of(family, version), reference_of(family)
    assert run["losses"] == pytest.approx(expected["losses"][:NUM_STEPS], rel=RELATIVE)
    assert run["norms"] == pytest.approx(expected["norms"][:NUM_STEPS], rel=RELATIVE)
    assert_close(run["saved"], expected["saved"])


@each
def test_gathered_state_dict_keeps_ties(run_of: Run, family: str, version: int) -> None:
    assert run_of(family, version)["shared"] == reference_of(family)["shared"]


@each
def test_all_parameters_except_scalars_are_sharded(run_of: Run, family: str, version: int) -> None:
    run, expected = run_of(family, version), reference_of(family)
    scalars = [name for name, weight in expected["saved"].items() if weight.dim() == 0]
    assert sum(unit["num_params"] for unit in run["report"]["units"]) == expected["num_params"] - len(scalars)
    assert sum(rank["num_local_params"] for rank in run["report"]["ranks"]) == expected["num_params"] + len(scalars)
    assert run["unsharded"] == scalars


@each
def test_report_has_no_differences(run_of: Run, family: str, version: int) -> None:
    report = run_of(family, version)["report"]
    assert report["backend"] == f"fsdp{version}"
    assert [row for row in report["settings"] if row["status"] == "differs"] == []
    assert [problem for problem in report["problems"] if problem["severity"] != "note"] == []


@each
def test_full_and_sharded_states_resume_exactly(run_of: Run, family: str, version: int) -> None:
    run, expected = run_of(family, version), reference_of(family)
    for resumed in run["resumed"].values():
        assert all(torch.equal(resumed["loaded"][name], weight) for name, weight in run["saved"].items())
        assert resumed["loss"] == pytest.approx(expected["losses"][NUM_STEPS], rel=RELATIVE)
        assert resumed["norm"] == pytest.approx(expected["norms"][NUM_STEPS], rel=RELATIVE)
        assert_close(resumed["weights"], expected["weights"])


@pytest.mark.parametrize("optimizer", [plain_sgd, adam], ids=["plain-sgd", "adam"])
@pytest.mark.parametrize("version", [1, 2])
def test_resume_adds_no_optimizer_state(two_ranks: Ranks, version: int, optimizer: Any) -> None:
    run = two_ranks.run(train, "llava", config_of("llava", version), optimizer)[0]
    assert run["num_states"] < run["num_trained"], "the last layer of the vision tower must be unused"
    assert {kind: resumed["num_states"] for kind, resumed in run["resumed"].items()} == {
        "sharded": run["num_states"],
        "full": run["num_states"],
    }
