"""Cases that ranks run: checkpoints written by stock Accelerate, and the tensors that they must contain."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import fsdp_utils
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from tests.support.tiny import global_batch, my_part, tiny_llama

FULL = StateDictOptions(full_state_dict=True)


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


def save_full_fsdp1(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write the files that Accelerate writes on GPUs.

    On CPU ranks, FSDP1 crashes when it gathers the model, and returns one buffer for ``exp_avg`` and ``exp_avg_sq``.
    """
    states = {
        "pytorch_model_fsdp": get_model_state_dict(model, options=FULL),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FULL),
    }
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        for name, state in states.items():
            torch.save(state, folder / f"{name}.bin")


def _truth(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    tensors = get_model_state_dict(model, options=FULL)
    state = get_optimizer_state_dict(model, optimizer, options=FULL)
    return {
        "model": {name: _raw(tensor) for name, tensor in tensors.items()},
        "state": {name: {key: _raw(value) for key, value in entry.items()} for name, entry in state["state"].items()},
        "groups": state["param_groups"],
    }


def _raw(tensor: torch.Tensor) -> np.ndarray:
    """Return the bits of a tensor; numpy has no bfloat16."""
    tensor = tensor.detach().cpu().clone()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
