"""Checkpoints of stock Accelerate: every tensor is assembled from its pieces, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import fsdp_utils
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.problems import CheckpointError
from tests.support import checkpoint_formats_runs
from tests.support.assembled import assembled
from tests.support.checkpoint_formats_runs import save_full_fsdp1
from tests.support.ranks import Ranks
from tests.support.tiny import global_batch, my_part, tiny_llama

SHARDED, FULL, LOCAL = "SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"


def assert_model_is(checkpoint: Path, truth: dict[str, np.ndarray], form: str, number: int = 0) -> None:
    index = read_stored_model(checkpoint, number)
    assert index.format == form
    assert index.tensors.keys() == truth.keys()
    for name, expected in truth.items():
        assert assembled(index.root, index.tensors[name]).tobytes() == expected.tobytes(), name


def assert_optimizer_is(checkpoint: Path, truth: dict[str, Any], form: str, number: int = 0) -> None:
    index = read_stored_optimizer(checkpoint, number)
    assert index is not None
    assert index.format == form
    assert index.groups == truth["groups"]
    assert index.state.keys() == truth["state"].keys()
    for name, entry in truth["state"].items():
        assert index.state[name].keys() == entry.keys()
        for key, expected in entry.items():
            assert assembled(index.root, index.state[name][key]).tobytes() == expected.tobytes(), (name, key)


def _sharded(version: int, model: nn.Module, on_mesh: bool, use_orig_params: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if version == 2:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    wrap = partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
    place: dict[str, Any] = {"device_mesh": mesh} if on_mesh else {}
    return FullyShardedDataParallel(
        model, auto_wrap_policy=wrap, use_orig_params=use_orig_params, device_id=torch.device("cpu"), **place
    )


def _raw(tensor: torch.Tensor) -> np.ndarray:
    """Return the bits of a tensor; numpy has no bfloat16."""
    tensor = tensor.detach().cpu().clone()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _truth(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    tensors = get_model_state_dict(model, options=checkpoint_formats_runs.FULL)
    state = get_optimizer_state_dict(model, optimizer, options=checkpoint_formats_runs.FULL)
    return {
        "model": {name: _raw(tensor) for name, tensor in tensors.items()},
        "state": {name: {key: _raw(value) for key, value in entry.items()} for name, entry in state["state"].items()},
        "groups": state["param_groups"],
    }


def save_with_stock_accelerate(
    folder: str,
    version: int,
    kind: str,
    *,
    use_dcp: bool = True,
    on_mesh: bool = True,
    use_orig_params: bool = True,
    dtype: str = "float32",
    number: int = 0,
) -> dict[str, Any]:
    """Train two steps and save with Accelerate. Returns the full tensors as raw numpy arrays.

    Accelerate gives FSDP1 a mesh only if the config has one: with a mesh the state contains DTensors, without one
    ShardedTensors.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    model = _sharded(version, tiny_llama(tied=True).to(getattr(torch, dtype)), on_mesh, use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        model(**my_part(global_batch(step), dist.get_rank(), dist.get_world_size())).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    truth = _truth(model, optimizer)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
    if kind == "FULL_STATE_DICT" and version == 1:
        save_full_fsdp1(model, optimizer, Path(folder))
    else:
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, folder, number, use_dcp=use_dcp)
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, number, use_dcp=use_dcp)
    dist.barrier()
    return truth


@pytest.mark.parametrize(
    ("version", "kind", "how", "form"),
    [
        (1, SHARDED, {"on_mesh": True}, "dcp"),
        (1, SHARDED, {"on_mesh": False}, "dcp"),
        (1, SHARDED, {"on_mesh": False, "use_orig_params": False}, "dcp"),
        (2, SHARDED, {}, "dcp"),
        (1, SHARDED, {"on_mesh": True, "use_dcp": False}, "per_rank"),
        (1, SHARDED, {"on_mesh": False, "use_dcp": False}, "per_rank"),
        (2, SHARDED, {"use_dcp": False}, "per_rank"),
        (1, FULL, {}, "bin"),
        (2, FULL, {}, "bin"),
        (1, SHARDED, {"dtype": "bfloat16", "number": 1}, "dcp"),
        (2, SHARDED, {"dtype": "bfloat16", "number": 1, "use_dcp": False}, "per_rank"),
    ],
    ids=str,
)
def test_stock_checkpoint_is_read_completely(
    two_ranks: Ranks, tmp_path: Path, version: int, kind: str, how: dict[str, Any], form: str
) -> None:
    truth = two_ranks.run(save_with_stock_accelerate, str(tmp_path), version, kind, **how)[0]
    number = how.get("number", 0)
    assert_model_is(tmp_path, truth["model"], form, number)
    assert_optimizer_is(tmp_path, truth, form, number)


def test_file_of_a_missing_rank_is_reported(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(save_with_stock_accelerate, str(tmp_path), 2, SHARDED, use_dcp=False)
    (tmp_path / "pytorch_model_fsdp_0_rank1.bin").unlink()
    with pytest.raises(CheckpointError, match=r"_rank\*\.bin: .*Only .*rank0\.bin .*FSDP-E458"):
        read_stored_model(tmp_path)
    (tmp_path / "optimizer_0_rank0.bin").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer_0_rank0\.bin: .*FSDP-E457"):
        read_stored_optimizer(tmp_path)


def test_flat_parameters_of_fsdp1_are_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    truth = two_ranks.run(save_with_stock_accelerate, str(tmp_path), 1, LOCAL, on_mesh=False)[0]
    with pytest.raises(CheckpointError, match=r"SHARDED_STATE_DICT.*FSDP-E460"):
        read_stored_model(tmp_path)
    assert_optimizer_is(tmp_path, truth, "dcp")
