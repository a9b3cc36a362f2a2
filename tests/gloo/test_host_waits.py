"""The host waits for an accelerator no more often than with stock Accelerate, and not for each tensor."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.ranks.host_waits import STEP_CASES
from tests.gloo import cases_host_waits as cases
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", STEP_CASES)
def test_steps_wait_no_more_than_stock(two_accelerator_ranks: Ranks, case: str, version: int) -> None:
    for counts in two_accelerator_ranks.run(cases.count_in_steps, version, case):
        assert all(own <= stock for own, stock in zip(counts["plugin"], counts["stock"], strict=True)), counts


@pytest.mark.parametrize("version", [1, 2])
def test_waits_do_not_grow_with_the_model(two_accelerator_ranks: Ranks, tmp_path: Path, version: int) -> None:
    for num_layers in (2, 4):
        for counts in two_accelerator_ranks.run(cases.count_in_checkpoints, tmp_path, version, num_layers):
            assert counts["load"] <= 2 and counts["resume"] == 0, counts
            assert counts["save"] <= 5 and counts["save, asynchronous"] <= 1, counts


@pytest.mark.parametrize("version", [1, 2])
def test_shards_cross_the_bus_once_in_the_dtype_of_the_file(
    two_accelerator_ranks: Ranks, tmp_path: Path, version: int
) -> None:
    """The device casts bf16 to fp32: the host has no fp32 copy, and half as many bytes use page-locked memory."""
    config = {**parallel_config("full_shard", version, 2, use_cpu=False), "mixed_precision": "bf16"}
    for found in two_accelerator_ranks.run(cases.traffic_of_loading, str(tmp_path), config):
        assert found["dtypes"] == {"torch.float32"} and "cpu" not in found["devices"]
        assert found["sent"].pop("bfloat16") == 2 * found["elements"]
        assert sum(found["sent"].values()) <= found["buffers"] and found["cast"] <= found["buffers"]
        assert found["pageable"] == 0
