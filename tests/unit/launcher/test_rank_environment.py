"""Variables that scripts read before this package does."""

from __future__ import annotations

from typing import Any

import pytest

from hf_fsdp_plugin.launcher.flags import LaunchArguments
from hf_fsdp_plugin.launcher.rank_processes import settings_env
from hf_fsdp_plugin.launcher.world import World
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


@pytest.mark.parametrize("given", [{}, {"HIP_VISIBLE_DEVICES": "4,5"}])
def test_gpu_ids_replace_the_variable_of_rocm(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    spec = load_spec({"distributed_type": "FSDP"}, environ={})
    world = World(device="cuda", num_machines=1, machine_rank=0, num_local=2, gpu_ids="0,1")
    found = settings_env(spec, world, LaunchArguments())
    assert {name: found[name] for name in found if "VISIBLE" in name} == dict.fromkeys(
        ("CUDA_VISIBLE_DEVICES", *given), "0,1"
    )
