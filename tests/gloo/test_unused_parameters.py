"""Parameters that a micro-batch, a step or a rank does not use: losses and weights are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gloo import cases_unused_parameters as cases
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config
from tests.support.training import assert_same_weights

VERSIONS = pytest.mark.parametrize("version", [1, 2])
LAYERS = {"fsdp_transformer_layer_cls_to_wrap": "Layer"}
EXPERTS = {"fsdp_transformer_layer_cls_to_wrap": "Layer,Linear"}
ONE_UNIT = {"fsdp_auto_wrap_policy": "NO_WRAP"}


def config_of(version: int, settings: dict[str, Any], strategy: str = "full_shard") -> dict[str, Any]:
    return parallel_config(strategy, version, 2, **settings)


def check(ranks: Ranks, config: dict[str, Any], name: str, accumulation: int, **loop: Any) -> None:
    run, _ = ranks.run(cases.train, config, name, accumulation, **loop)
    expected = cases.reference(name, accumulation)
    assert run["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert_same_weights(run["weights"], expected["weights"], 1e-6)


@VERSIONS
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", cases.USES)
def test_unused_parameters_train_as_in_one_process(
    two_ranks: Ranks, name: str, accumulation: int, version: int
) -> None:
    check(two_ranks, config_of(version, LAYERS), name, accumulation)


@VERSIONS
@pytest.mark.parametrize("settings", [EXPERTS, ONE_UNIT], ids=["experts", "one unit"])
@pytest.mark.parametrize("name", ["another expert in each micro-batch", "another head in each step"])
def test_unused_parameters_in_other_units_train_equally(
    two_ranks: Ranks, name: str, settings: dict[str, Any], version: int
) -> None:
    check(two_ranks, config_of(version, settings), name, 3)


@VERSIONS
@pytest.mark.parametrize("strategy", ["shard_grad_op", "no_shard"])
def test_unused_parameters_of_other_strategies_train_equally(two_ranks: Ranks, strategy: str, version: int) -> None:
    check(two_ranks, config_of(version, LAYERS, strategy), "tower in the first micro-batch", 3)
    check(two_ranks, config_of(version, LAYERS, strategy), "another expert on each rank", 1)


@VERSIONS
def test_unused_parameters_of_reduced_batches_train_equally(two_ranks: Ranks, version: int) -> None:
    check(two_ranks, config_of(version, LAYERS), "another expert on each rank", 3, every_batch=True)


@VERSIONS
@pytest.mark.parametrize(
    "name",
    ["tower in the last micro-batch", "tower in the first micro-batch", "another expert on each rank",
     "expert of one rank in the last micro-batch"],
)  # fmt: skip
def test_unused_parameters_train_in_bf16(two_ranks: Ranks, name: str, version: int) -> None:
    config = {**config_of(version, LAYERS), "mixed_precision": "bf16"}
    run, _ = two_ranks.run(cases.train, config, name, 3)
    assert run["losses"] == pytest.approx(cases.reference(name, 3)["losses"], rel=2e-2)


@VERSIONS
def test_parameters_that_no_rank_uses_have_no_gradient(two_ranks: Ranks, version: int) -> None:
    for run in two_ranks.run(cases.train, config_of(version, EXPERTS), "another head in each step", 1):
        assert run["unused_gradients"] == 0


@VERSIONS
@pytest.mark.parametrize("num_steps", [1, 2])
def test_training_with_unused_parameters_is_resumed(
    two_ranks: Ranks, num_steps: int, version: int, tmp_path: Path
) -> None:
    """After one step, some parameters have no optimizer state."""
    config, name, folder = config_of(version, LAYERS), "another head in each step", str(tmp_path / "state")
    two_ranks.run(cases.train, config, name, 1, steps=range(num_steps), folder=folder)
    steps = range(num_steps, cases.NUM_STEPS)
    run, _ = two_ranks.run(cases.train, config, name, 1, steps=steps, folder=folder)
    expected = cases.reference(name, 1)
    assert run["losses"] == pytest.approx(expected["losses"][num_steps:], rel=1e-6)
    assert_same_weights(run["weights"], expected["weights"], 1e-6)


def test_unused_parameters_of_flat_ones_are_named(two_ranks: Ranks) -> None:
    config = config_of(1, {**LAYERS, "fsdp_use_orig_params": False})
    printed = two_ranks.run(cases.warnings_of_training, config, "another head in each step")[0]
    assert "FSDP-W314" in printed and "heads.0.weight" in printed and "layers.0.experts.1.weight" in printed
    printed = two_ranks.run(cases.warnings_of_training, config, "another head on each rank")[0]
    assert "heads." not in printed
