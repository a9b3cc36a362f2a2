"""Optimizer steps that change nothing, and gradients that add up, are errors; the report counts what changed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.cases_idle_steps import NUM_STEPS, run_batches, run_loop
from tests.support.json_schema import assert_valid
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config

VERSIONS = [1, 2]


def run(two_ranks: Ranks, version: int, name: str) -> dict[str, Any]:
    first, second = two_ranks.run(run_loop, parallel_config("full_shard", version, 2), name)
    assert first["codes"] == second["codes"] and first["raised"] == second["raised"]
    return first


def test_unprepared_optimizer_is_an_error_at_its_second_step(two_ranks: Ranks) -> None:
    assert run(two_ranks, 2, "unprepared_optimizer") == {"codes": ["FSDP-E513"], "raised": True}


@pytest.mark.parametrize("version", VERSIONS)
def test_gradients_that_are_never_zeroed_are_an_error(two_ranks: Ranks, version: int) -> None:
    assert run(two_ranks, version, "never_zeroed") == {"codes": ["FSDP-E514"], "raised": True}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "num_steps"),
    [
        ("zeroed_before_backward", NUM_STEPS),
        ("zeroed_in_place", NUM_STEPS),
        ("accumulated_by_hand", NUM_STEPS),
        ("discriminator", NUM_STEPS),
        ("with_frozen_reference", NUM_STEPS),
        ("two_optimizers", 3 * NUM_STEPS),
        ("optimizer_of_shards", NUM_STEPS - 1),
    ],
)
def test_loop_that_trains_is_reported(two_ranks: Ranks, version: int, name: str, num_steps: int) -> None:
    found = run(two_ranks, version, name)
    training = found["report"]["training"]
    assert found["codes"] == [] and "none differs" in found["summary"]
    assert training["steps"] == num_steps
    assert training["changed_parameters"] == training["trained_parameters"] > 20
    assert f"training: {num_steps} optimizer steps; {training['changed_parameters']} of " in found["summary"]
    assert_valid("report", found["report"])


def test_penalty_on_shards_is_no_problem(two_ranks: Ranks) -> None:
    found = run(two_ranks, 2, "penalty_on_shards")
    assert found["codes"] == [] and found["report"]["training"]["steps"] == NUM_STEPS


def test_optimizer_of_flat_parameters_trains_unprepared(two_ranks: Ranks) -> None:
    """FSDP1 keeps the parameter objects, so an optimizer that was created before ``prepare`` trains."""
    found = run(two_ranks, 1, "unprepared_optimizer")
    assert found["codes"] == [] and found["report"]["training"]["changed_parameters"] > 20


def test_optimizers_that_step_in_the_backward_train(two_ranks: Ranks) -> None:
    found = run(two_ranks, 2, "optimizer_in_backward")
    training = found["report"]["training"]
    assert found["codes"] == [] and "none differs" in found["summary"]
    assert training["steps"] > 0 and training["changed_parameters"] > 0


@pytest.mark.parametrize("version", VERSIONS)
def test_backwards_without_a_step_are_reported(two_ranks: Ranks, version: int) -> None:
    found = run(two_ranks, version, "no_step")
    assert found["codes"] == ["FSDP-E515"]
    assert "none differs" not in found["summary"] and "no optimizer step was observed" in found["summary"]
    assert found["report"]["training"] == {
        "steps": 0, "examined_steps": 0, "changed_parameters": None, "trained_parameters": None,
        "unchanged_parameters": [],
    }  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_evaluation_has_no_problem_but_no_step(two_ranks: Ranks, version: int) -> None:
    found = run(two_ranks, version, "evaluation")
    assert found["codes"] == [] and "none differs" not in found["summary"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("added_before_the_optimizer", "head.weight"),
        ("replaced_before_the_optimizer", "lm_head.weight"),
        ("added_to_a_group", "head.weight"),
        ("added_for_an_unprepared_optimizer", "head.weight"),
    ],
)
def test_training_of_added_parameters_is_refused(two_ranks: Ranks, version: int, name: str, parameter: str) -> None:
    config = parallel_config("full_shard", version, 2)
    for found in two_ranks.run(run_loop, config, name, with_message=True):
        assert (set(found["codes"]), found["raised"]) == ({"FSDP-E517"}, True) and parameter in found["message"]


@pytest.mark.parametrize("version", VERSIONS)
def test_added_parameters_are_reported_and_named_in_a_save(two_ranks: Ranks, version: int) -> None:
    found = run(two_ranks, version, "added_and_saved")
    rows = {row["setting"]: row for row in found["report"]["settings"]}
    assert rows["sharding.strategy"]["status"] == "differs" and "head.weight" in rows["sharding.strategy"]["reason"]
    assert [row["setting"] for row in rows.values() if row["status"] == "differs"] == ["sharding.strategy"]
    assert "FSDP-W518" in found["printed"] and "head.weight" in found["printed"]


@pytest.mark.parametrize("version", VERSIONS)
def test_parameters_added_before_prepare_are_accepted(two_ranks: Ranks, version: int) -> None:
    found = run(two_ranks, version, "added_before_prepare")
    assert (found["codes"], found["warnings"]) == ([], []) and "none differs" in found["summary"]
    assert "FSDP-W518" not in found["printed"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "warnings", "text"),
    [
        ("no_rate", ["FSDP-W519"], "the learning rate was 0 in all 3 optimizer steps"),
        ("warm_up", [], ""),
        ("rate_by_rank", ["FSDP-W520"], "lr of AdamW differs by rank in step 1: 0.0001 on rank 0, 0.01 on rank 1"),
        ("one_group_without_rate", [], "changed, not model.layers.0."),
        ("same_parameters_twice", ["FSDP-W521"], "are in SGD and in SGD"),
        ("one_optimizer_after_the_other", [], ""),
        ("loss_is_nan", ["FSDP-W522"], "30 parameters of the trained model contain NaN or infinity"),
    ],
)
def test_steps_that_do_not_train_as_intended_are_named(
    two_ranks: Ranks, version: int, name: str, warnings: list[str], text: str
) -> None:
    found = run(two_ranks, version, name)
    assert (found["codes"], found["warnings"]) == ([], warnings)
    assert text in " ".join(found["summary"].split())
    assert_valid("report", found["report"])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("accumulation", "sizes", "kind", "size", "text"),
    [
        (2, (4, 4), "accumulated", 16, ""),
        (2, (4, 4), "not accumulated", 8, "2 forwards per optimizer step were requested, but 1 was observed"),
        (1, (4, 2), "accumulated", 6, "batches of different sizes: 2 to 4"),
        (1, (4, 4), "first only", 2, "4 samples per forward were requested, but 1 was observed"),
        (1, (4, 4), "packed", 8, ""),
    ],
)
def test_effective_batch_size_is_the_observed_one(
    two_ranks: Ranks, version: int, accumulation: int, sizes: tuple[int, int], kind: str, size: int, text: str
) -> None:
    config = parallel_config("full_shard", version, 2)
    for found in two_ranks.run(run_batches, config, accumulation, sizes, kind):
        assert found["size"] == size and f"effective batch size {size}" in found["table"]
        assert len(found["messages"]) == bool(text) and text in "".join(found["messages"])
