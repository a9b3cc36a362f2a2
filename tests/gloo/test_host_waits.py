"""The host waits for an accelerator no more often than with stock Accelerate, and not for each tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_fsdp_plugin.torch_private.modules import local_tensor
from scripts.bench.ranks import host_waits as bench
from scripts.bench.ranks.host_waits import STEP_CASES
from tests.support.model_families import FAMILIES
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config
from tests.support.training import fresh_accelerator


class HostTraffic(TorchDispatchMode):
    """Records the bytes of copies from host memory to the device by dtype, and floats that are computed on the host.

    Attributes:
        sent: bytes by dtype of the source.
        pageable: bytes of the sources that are not page-locked.
        cast: elements of fp32 tensors that an operator has returned in new host memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, int] = {}
        self.pageable = self.cast = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        name = func._schema.name
        if name in ("aten::copy_", "aten::_to_copy", "aten::to") and isinstance(result, torch.Tensor):
            source = tensors[-1]
            if source.device.type == "cpu" and result.device.type != "cpu":
                dtype = str(source.dtype).removeprefix("torch.")
                self.sent[dtype] = self.sent.get(dtype, 0) + source.nbytes
                self.pageable += 0 if source.is_pinned() else source.nbytes
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.dtype == torch.float32:
                self.cast += leaf.numel()
        return result


def count_in_steps(version: int, case: str) -> dict[str, list[int]]:
    """Number of host waits in each step, stock and with the plugin."""
    options = {**bench.SETTINGS, **bench.STEP_CASES[case], "FSDP_VERSION": str(version)}
    return {who: [len(waits) for waits in bench.steps(who, options)] for who in ("stock", "plugin")}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", STEP_CASES)
def test_steps_wait_no_more_than_stock(two_accelerator_ranks: Ranks, case: str, version: int) -> None:
    for counts in two_accelerator_ranks.run(count_in_steps, version, case):
        assert all(own <= stock for own, stock in zip(counts["plugin"], counts["stock"], strict=True)), counts


def count_in_checkpoints(folder: Path, version: int, num_layers: int) -> dict[str, int]:
    """Number of host waits of the plugin in loading, saving and resuming."""
    options = {**bench.SETTINGS, "FSDP_VERSION": str(version)}
    waits = bench.load_save_resume("plugin", folder / str(num_layers), num_layers, options)
    dist.barrier()
    return {phase: len(found) for phase, found in waits.items()}


@pytest.mark.parametrize("version", [1, 2])
def test_waits_do_not_grow_with_the_model(two_accelerator_ranks: Ranks, tmp_path: Path, version: int) -> None:
    for num_layers in (2, 4):
        for counts in two_accelerator_ranks.run(count_in_checkpoints, tmp_path, version, num_layers):
            assert counts["load"] <= 2 and counts["resume"] == 0, counts
            assert counts["save"] <= 5 and counts["save, asynchronous"] <= 1, counts


def traffic_of_loading(folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """Save a model in bf16, load it into fp32 shards on the device, and return what went over the bus."""
    if dist.get_rank() == 0:
        FAMILIES["llama"].build().to(torch.bfloat16).save_pretrained(folder)
    dist.barrier()
    accelerator = fresh_accelerator(config)
    model = FAMILIES["llama"].model.from_pretrained(folder, dtype=torch.bfloat16)
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    with HostTraffic() as traffic:
        model = accelerator.prepare(model)
    shards = [local_tensor(parameter) for parameter in model.parameters()]
    return {
        "sent": traffic.sent,
        "pageable": traffic.pageable,
        "cast": traffic.cast,
        "buffers": buffers,
        "elements": sum(shard.numel() for shard in shards),
        "dtypes": {str(shard.dtype) for shard in shards},
        "devices": {shard.device.type for shard in shards},
    }


@pytest.mark.parametrize("version", [1, 2])
def test_shards_cross_the_bus_once_in_the_dtype_of_the_file(
    two_accelerator_ranks: Ranks, tmp_path: Path, version: int
) -> None:
    """The device casts bf16 to fp32: the host has no fp32 copy, and half as many bytes use page-locked memory."""
    config = {**parallel_config("full_shard", version, 2, use_cpu=False), "mixed_precision": "bf16"}
    for found in two_accelerator_ranks.run(traffic_of_loading, str(tmp_path), config):
        assert found["dtypes"] == {"torch.float32"} and "cpu" not in found["devices"]
        assert found["sent"].pop("bfloat16") == 2 * found["elements"]
        assert sum(found["sent"].values()) <= found["buffers"] and found["cast"] <= found["buffers"]
        assert found["pageable"] == 0
