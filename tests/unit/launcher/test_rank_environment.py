"""Variables that scripts read before this package does."""

from __future__ import annotations

from typing import Any

import pytest

from hf_fsdp_plugin.launcher.rank_environment import mesh_env
from hf_fsdp_plugin.launcher.world import World
from hf_fsdp_plugin.spec.load import load_spec


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tp_size": 2}, {"DP_SHARD": 4, "CP": 1, "TP": 2}),
        ({"cp_size": 2, "dp_replicate_size": 2}, {"DP_REPLICATE": 2, "DP_SHARD": 2, "CP": 2, "TP": 1}),
        ({"dp_shard_size": 4, "dp_replicate_size": 2}, {"DP_REPLICATE": 2, "DP_SHARD": 4, "CP": 1, "TP": 1}),
        ({}, {}),
    ],
)
def test_sizes_of_axes_are_variables_as_of_accelerate(sizes: dict[str, int], expected: dict[str, int]) -> None:
    config: dict[str, Any] = {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2},
        "parallelism_config": {f"parallelism_config_{name}": size for name, size in sizes.items()},
    }
    world = World(device="cpu", num_machines=2, machine_rank=0, num_local=4)
    found = mesh_env(load_spec(config, environ={}), world)
    assert found == {f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in expected.items()}
