"""Variables that scripts read before this package does."""

from __future__ import annotations

from typing import Any

import pytest

from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.spec.rules import mesh_variables


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"tp_size": 2}, {"DP_SHARD": 4, "CP": 1, "TP": 2}),
        ({"cp_size": 2, "dp_replicate_size": 2}, {"DP_REPLICATE": 2, "DP_SHARD": 2, "CP": 2, "TP": 1}),
        ({"dp_shard_size": 4, "dp_replicate_size": 2}, {"DP_REPLICATE": 2, "DP_SHARD": 4, "CP": 1, "TP": 1}),
        ({"ep_size": 4}, {"DP_SHARD": 8, "CP": 1, "TP": 1}),
        ({"ep_size": 4, "tp_size": 2, "dp_replicate_size": 2}, {"DP_REPLICATE": 2, "DP_SHARD": 2, "CP": 1, "TP": 2}),
        ({}, {}),
    ],
)
def test_sizes_of_axes_are_variables_as_of_accelerate(sizes: dict[str, int], expected: dict[str, int]) -> None:
    config: dict[str, Any] = {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2},
        "parallelism_config": {f"parallelism_config_{name}": size for name, size in sizes.items()},
    }
    found = mesh_variables(load_spec(config, environ={}), 8)
    assert found == {f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in expected.items()}
