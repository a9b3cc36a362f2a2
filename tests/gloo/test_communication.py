"""The estimated collectives of a step are those that real ranks run: kind, ranks, bytes, phase, number of calls."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.communication_runs import counted_and_estimated
from tests.support.matrices import alternating, slow
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config

BF16 = {"mixed_precision": "bf16"}

NESTED = {"fsdp_transformer_layer_cls_to_wrap": "LlamaMLP,LlamaDecoderLayer"}

SIZE = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000}

CHECKPOINT = {"fsdp_activation_checkpointing": True}

NATIVE = {"training_arguments": {"gradient_checkpointing": True}}


def check(ranks: Ranks, model: str, config: dict[str, Any], **loop: Any) -> None:
    for counted, estimated in ranks.run(counted_and_estimated, model, config, **loop):
        assert counted == estimated
        assert counted


@pytest.mark.parametrize(
    ("strategy", "version"),
    alternating(["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"]),
)
@pytest.mark.parametrize(
    ("precision", "loop"),
    [slow({}, {}), slow({}, {"accumulation": 2}), slow(BF16, {"accumulation": 2, "sync_each_batch": True}),
     (BF16, {"accumulation": 2})],
    ids=["fp32", "accumulation", "sync_each_batch", "bf16-accumulation"],
)  # fmt: skip
def test_collectives_of_four_ranks_equal_estimate(
    four_ranks: Ranks, strategy: str, version: int, precision: dict[str, Any], loop: dict[str, Any]
) -> None:
    check(four_ranks, "llama", {**parallel_config(strategy, version, 4), **precision}, **loop)


@pytest.mark.parametrize(
    ("settings", "version"),
    alternating(
        [
            CHECKPOINT,
            {**CHECKPOINT, **NESTED},
            {**CHECKPOINT, **SIZE},
            SIZE,
            {"fsdp_activation_checkpointing": "selective"},
            {"fsdp_use_orig_params": False},
            {"fsdp_ignored_modules": r"model\.norm"},
            {"fsdp_auto_wrap_policy": "NO_WRAP"},
            {"fsdp_backward_prefetch": "BACKWARD_POST", "fsdp_forward_prefetch": True},
            {"fsdp_backward_prefetch": "NO_PREFETCH"},
            {"fsdp_mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": "bf16"}},
        ]
    ),
    ids=str,
)
def test_setting_changes_estimate_as_it_does_a_step(two_ranks: Ranks, settings: dict[str, Any], version: int) -> None:
    check(two_ranks, "llama", parallel_config("full_shard", version, 2, **settings), accumulation=2)


@pytest.mark.parametrize("version", [slow(1), 2])
def test_padding_of_few_experts_is_estimated(four_ranks: Ranks, version: int) -> None:
    check(four_ranks, "experts", {**parallel_config("full_shard", version, 4), **BF16})


@pytest.mark.parametrize(("model", "version"), alternating(["half", "embeddings", "lora", "bert", "llama-bf16"]))
def test_frozen_parameters_are_estimated(two_ranks: Ranks, model: str, version: int) -> None:
    check(two_ranks, model, parallel_config("full_shard", version, 2))


@pytest.mark.parametrize(
    ("prefetch", "strategy"), [slow("BACKWARD_POST", "full_shard"), ("NO_PREFETCH", "full_shard"),
                               slow("BACKWARD_PRE", "shard_grad_op")],
)  # fmt: skip
@pytest.mark.parametrize("version", [slow(1), 2])
def test_prefetch_of_frozen_unit_is_estimated(two_ranks: Ranks, version: int, prefetch: str, strategy: str) -> None:
    check(two_ranks, "embeddings", parallel_config(strategy, version, 2, fsdp_backward_prefetch=prefetch))


@pytest.mark.parametrize(
    ("model", "settings", "version"),
    [("llama", {}, 2), slow("llama", {}, 1), ("llama", SIZE, 1), slow("lora", {"fsdp_use_orig_params": False}, 1)],
)
def test_native_checkpointing_is_estimated(
    two_ranks: Ranks, model: str, settings: dict[str, Any], version: int
) -> None:
    check(two_ranks, model, parallel_config("full_shard", version, 2, **settings), **NATIVE)


@pytest.mark.parametrize("version", [1, 2])
def test_step_without_clipping_is_estimated(two_ranks: Ranks, version: int) -> None:
    check(two_ranks, "llama", parallel_config("full_shard", version, 2), clip_norm=False)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", slow("hybrid_shard")])
def test_collectives_of_one_rank_are_estimated(one_rank: Ranks, strategy: str) -> None:
    config = parallel_config(strategy, 2, 1)
    config.pop("parallelism_config", None)
    for counted, estimated in one_rank.run(counted_and_estimated, "llama", config):
        assert counted == estimated
