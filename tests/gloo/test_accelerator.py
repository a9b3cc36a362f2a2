"""Training on a device that is not the CPU computes the same as one process, without races on the device."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.accelerator_build import BACKEND, available
from tests.support.launching import environment, write
from tests.support.matrices import alternating, slow
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config
from tests.support.training import assert_same_training, reference, resume_with_default_device, train

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


@pytest.mark.parametrize("version", [slow(1), 2])
def test_hybrid_mesh_matches_on_device(four_accelerator_ranks: Ranks, version: int) -> None:
    found = four_accelerator_ranks.run(train, "llama", _config(version, "hybrid_shard", 4))[0]
    assert_same_training(found, reference_of("llama"))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_default_device_of_a_script_changes_nothing(
    two_accelerator_ranks: Ranks, tmp_path: Path, version: int, asynchronous: bool
) -> None:
    """After ``torch.set_default_device``, buffers in host memory are still made there."""
    config = _config(version, fsdp_cpu_ram_efficient_loading=True, async_save=asynchronous)
    before, again = two_accelerator_ranks.run(resume_with_default_device, str(tmp_path), config)[0]
    assert before == again


ONE_DEVICE = """
    import json, os, sys
    import torch, torch.distributed as dist
    import hf_fsdp_plugin as hfp

    hfp.install("fsdp.yaml")
    before = torch.npu.current_device(), dist.is_initialized()
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 8, device=accelerator.device)).sum())
    optimizer.step()
    accelerator.wait_for_everyone()
    accelerator.save_state("checkpoint")
    with accelerator.main_process_first():
        pass
    weights = accelerator.get_state_dict(model)
    found = {"before": before, "device": str(accelerator.device), "count": torch.npu.device_count()}
    with open(f"rank_{os.environ['RANK']}.json", "w") as file:
        json.dump(found, file)
    accelerator.end_training()
"""


@pytest.mark.parametrize("visible", [slow("own"), "all"])
def test_ranks_use_their_device_whatever_they_see(tmp_path: Path, visible: str) -> None:
    """`srun --gpus-per-task` shows each rank its own device, whose index is then 0 whatever the local rank is."""
    if reason := available():
        pytest.skip(f"no simulated accelerator: {reason}")
    write(tmp_path, ONE_DEVICE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in ("0", "1"):
        variables = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
            "ASCEND_RT_VISIBLE_DEVICES": rank if visible == "own" else "0,1",
            "PYTHONPATH": os.pathsep.join([str(BACKEND), str(BACKEND.parents[2])]),
        }  # fmt: skip
        command = [sys.executable, "train.py"]
        processes.append(
            subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path, **variables), stderr=subprocess.PIPE)
        )
    errors = [process.communicate(timeout=300)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    for rank in (0, 1):
        index = 0 if visible == "own" else rank
        assert json.loads((tmp_path / f"rank_{rank}.json").read_text()) == {
            "before": [index, False], "device": f"npu:{index}", "count": 1 if visible == "own" else 2,
        }  # fmt: skip
    assert (tmp_path / "checkpoint" / "fsdp_manifest.json").is_file()
