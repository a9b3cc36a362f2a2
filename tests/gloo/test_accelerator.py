"""Training on a device that is not the CPU computes the same as one process, without races on the device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from matrices import alternating
from ranks import Ranks
from tiny import parallel_config
from training import assert_same_training, reference, train

reference_of = cache(reference)


def _config(version: int, strategy: str = "full_shard", world_size: int = 2, **settings: Any) -> dict[str, Any]:
    return parallel_config(strategy, version, world_size, use_cpu=False, **settings)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_device_ranks_match_single_process(two_accelerator_ranks: Ranks, version: int, strategy: str) -> None:
    found = two_accelerator_ranks.run(train, "llama", _config(version, strategy))[0]
    assert_same_training(found, reference_of("llama"))


@pytest.mark.parametrize(
    ("settings", "version"),
    alternating(
        [
            {"fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_forward_prefetch": True},
            {"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True},
        ]
    ),
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(key.removeprefix("fsdp_") for key in value),
)
def test_setting_on_device_does_not_change_results(
    two_accelerator_ranks: Ranks, version: int, settings: dict[str, Any]
) -> None:
    found = two_accelerator_ranks.run(train, "llama", _config(version, **settings))[0]
    assert_same_training(found, reference_of("llama"))


@pytest.mark.parametrize("version", [1, 2])
def test_offload_on_device_does_not_change_results(two_accelerator_ranks: Ranks, version: int) -> None:
    found = two_accelerator_ranks.run(train, "llama", _config(version, fsdp_offload_params=True))[0]
    assert_same_training(found, reference_of("llama"))


@pytest.mark.parametrize("version", [1, 2])
def test_bf16_with_accumulation_trains_on_device(two_accelerator_ranks: Ranks, version: int) -> None:
    config = {**_config(version), "mixed_precision": "bf16"}
    found = two_accelerator_ranks.run(train, "bert", config, accumulation=2)[0]
    assert found["losses"] == pytest.approx(reference_of("bert")["losses"], rel=0.01)


@pytest.mark.parametrize("version", [1, 2])
def test_hybrid_mesh_matches_on_device(four_accelerator_ranks: Ranks, version: int) -> None:
    found = four_accelerator_ranks.run(train, "llama", _config(version, "hybrid_shard", 4))[0]
    assert_same_training(found, reference_of("llama"))
