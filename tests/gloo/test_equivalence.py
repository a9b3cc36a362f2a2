"""Sharded training and one process compute the same losses, gradient norms and final weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.support.matrices import alternating, slow
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config
from tests.support.training import (
    assert_same_training,
    count_process_groups,
    prepare_different_models,
    reference,
    timeouts_of_new_mesh,
    train,
    train_ddp_bf16,
)

reference_of = cache(reference)


@pytest.mark.parametrize("model", ["llama", "bert"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_two_ranks_match_single_process(two_ranks: Ranks, model: str, version: int, strategy: str) -> None:
    assert_same_training(two_ranks.run(train, model, parallel_config(strategy, version, 2))[0], reference_of(model))


@pytest.mark.parametrize("model", [slow("llama"), "bert"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2"])
def test_hybrid_mesh_matches_single_process(four_ranks: Ranks, model: str, version: int, strategy: str) -> None:
    assert_same_training(four_ranks.run(train, model, parallel_config(strategy, version, 4))[0], reference_of(model))


@pytest.mark.parametrize(
    ("settings", "version"),
    alternating(
        [
            {"fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_forward_prefetch": True},
            {"fsdp_backward_prefetch": "BACKWARD_POST"},
            {"fsdp_backward_prefetch": "NO_PREFETCH"},
            {"fsdp_activation_checkpointing": True},
            {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True},
            {"fsdp_activation_checkpointing": "selective"},
            {"fsdp_offload_params": True},
            {"fsdp_use_orig_params": False},
            {"fsdp_ignored_modules": r"model\.norm"},
            {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 2000},
            {"fsdp_auto_wrap_policy": "NO_WRAP"},
        ]
    ),
    ids=lambda value: (
        str(value)
        if isinstance(value, int)
        else "-".join(f"{key.removeprefix('fsdp_')}={chosen}" for key, chosen in value.items())
    ),
)
def test_setting_does_not_change_results(two_ranks: Ranks, version: int, settings: dict[str, Any]) -> None:
    config = parallel_config("full_shard", version, 2, **settings)
    assert_same_training(two_ranks.run(train, "llama", config)[0], reference_of("llama"))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "loop",
    [{"accumulation": 2}, {"accumulation": 2, "no_sync": "model"}, {"order": "first"}],
    ids=["accumulation", "no_sync", "model-first"],
)
def test_loop_variant_matches_single_process(two_ranks: Ranks, version: int, loop: dict[str, Any]) -> None:
    """The variants accumulate gradients, or prepare the model before the optimizer is created."""
    config = parallel_config("full_shard", version, 2)
    assert_same_training(two_ranks.run(train, "llama", config, **loop)[0], reference_of("llama"))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("strategy", ["no_shard", slow("shard_grad_op")])
def test_tied_bf16_model_accumulates_gradients(two_ranks: Ranks, strategy: str, version: int) -> None:
    config = {**parallel_config(strategy, version, 2), "mixed_precision": "bf16"}
    found = two_ranks.run(train, "bert", config, accumulation=2)[0]
    assert found["losses"] == pytest.approx(reference_of("bert")["losses"], rel=0.01)
    assert found["norms"] == pytest.approx(reference_of("bert")["norms"], rel=0.05)


@pytest.mark.parametrize("version", [1, 2])
def test_bf16_error_is_close_to_error_of_ddp(two_ranks: Ranks, version: int) -> None:
    config = {**parallel_config("full_shard", version, 2), "mixed_precision": "bf16"}
    fp32 = torch.tensor(reference_of("llama")["losses"])
    ddp = (torch.tensor(two_ranks.run(train_ddp_bf16, "llama")[0]) - fp32).abs().max().item()
    ours = (torch.tensor(two_ranks.run(train, "llama", config)[0]["losses"]) - fp32).abs().max().item()
    # Both errors are a few bf16 roundings; the bound leaves room for another order of operations.
    assert 0 < ours < 3 * ddp + 1e-3


def test_ranks_with_different_models_are_refused(two_ranks: Ranks) -> None:
    assert two_ranks.run(prepare_different_models) == [["FSDP-E302"]] * 2


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", "hybrid_shard"])
def test_models_of_one_mesh_share_process_groups(two_ranks: Ranks, strategy: str, version: int) -> None:
    for first, *later in two_ranks.run(count_process_groups, parallel_config(strategy, version, 2), 3):
        assert later == [first, first]


def test_groups_of_a_mesh_have_the_timeout_of_the_world(two_ranks: Ranks) -> None:
    # A group that torch creates has torch's default.
    assert two_ranks.run(timeouts_of_new_mesh) == [[77.0, 1800.0, 77.0, 77.0]] * 2
