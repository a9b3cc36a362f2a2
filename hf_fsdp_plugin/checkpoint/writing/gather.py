"""Gathers whole state dicts in the memory of rank 0, for callers that need tensors instead of files."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from hf_fsdp_plugin.backends.shard import plan_of
from hf_fsdp_plugin.checkpoint.formats.boxes import slices, whole
from hf_fsdp_plugin.checkpoint.shards import model_shards, shards_to_write


def full_model_state(model: nn.Module) -> dict[str, Any]:
    """Return the model's whole state dict by canonical names, on the CPU of rank 0; empty on other ranks. Collective.

    The names of tied weights share one tensor, as in the model's own state dict.
    """
    # CPU ranks need no offload, and FSDP1 crashes with cpu_offload.
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    options = StateDictOptions(full_state_dict=True, cpu_offload=not on_cpu)
    state = _with_shared_tensors(model, get_model_state_dict(model, options=options))
    return state if dist.get_rank() == 0 else {}


def trainable_state(model: nn.Module, also: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Return whole trainable parameters by canonical names, on the CPU of rank 0; empty on other ranks. Collective.

    This is for adapters: the frozen base model, which may be many times larger, is not gathered.

    Args:
        also: names of frozen tensors to include, the same on all ranks.
    """
    mine = [
        (shard.name, shard.shape, piece.box, piece.tensor.detach().cpu().contiguous())
        for shard in shards_to_write(model_shards(model).tensors)
        if not shard.frozen or shard.name in also
        for piece in shard.pieces
    ]
    rank = dist.get_rank()
    gathered: list[Any] | None = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(mine, gathered)
    state: dict[str, torch.Tensor] = {}
    for name, shape, box, tensor in (piece for pieces in gathered or () for piece in pieces):
        if name not in state:
            state[name] = torch.empty(shape, dtype=tensor.dtype)
        state[name][slices(box, whole(shape))] = tensor
    return state


def _with_shared_tensors(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Make the names of a tied parameter share one tensor, as in the model. torch gathers one tensor per name."""
    plan = plan_of(model)
    for names in plan.ties if plan is not None else ():
        present = [name for name in names if name in state]
        for name in present[1:]:
            state[name] = state[present[0]]
    return state
