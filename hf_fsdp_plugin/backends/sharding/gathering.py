"""All-gathers of whole parameters that run in the background, outside of the forwards of a model.

They read the shards only: neither the parameters in the modules nor FSDP's own gathered copies are changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from hf_fsdp_plugin.backends.torch_types import dtensor_like
from hf_fsdp_plugin.torch_private import fsdp1
from hf_fsdp_plugin.torch_private.functions import is_sharded
from hf_fsdp_plugin.torch_private.modules import local_tensor

Finish = Callable[[], torch.Tensor]
"""Waits for an all-gather, and returns the whole tensor."""


def start_gather(parameter: torch.Tensor, dtype: torch.dtype | None = None) -> Finish:
    """Start to gather a parameter. Collective over the ranks that shard it.

    Args:
        parameter: a shard of FSDP2, or a tensor that is whole on each rank, of which a copy is returned.
        dtype: dtype of the whole tensor, in which it is sent; by default, that of the shards.
    """
    local = local_tensor(parameter.detach())
    dtype = dtype if dtype is not None and local.is_floating_point() else local.dtype
    if not isinstance(parameter, DTensor):
        return lambda: local.to(dtype, copy=True)
    device, mesh = parameter.device_mesh.device_type, parameter.device_mesh
    axes = [axis for axis, placement in enumerate(parameter.placements) if is_sharded(placement)]
    if not axes:
        return lambda: local.to(device, dtype, copy=True)
    local = local.to(device, dtype)
    if len(axes) > 1 or parameter.placements[axes[0]] != Shard(0):  # of a tensor or expert axis
        return dtensor_like(local, parameter).full_tensor
    rows, shape = -(-parameter.shape[0] // mesh.size(axes[0])), parameter.shape
    if local.shape[0] < rows:  # the last ranks have fewer rows
        local = torch.cat([local, local.new_zeros(rows - local.shape[0], *shape[1:])])
    finish = _all_gather(local.contiguous(), mesh.get_group(axes[0]))
    return lambda: finish().narrow(0, 0, shape[0])


def start_flat_gather(unit: Any, flat: Any, dtype: torch.dtype | None = None) -> list[Finish]:
    """Start to gather a unit of FSDP1. Collective over the ranks that shard it.

    Returns:
        A function for each original parameter, in the order of ``fsdp1.original_parameters``. The tensors are views of
        one tensor.
    """
    shard = fsdp1.local_shard(flat).detach()
    local = shard.to(fsdp1.compute_device(unit), dtype or shard.dtype)
    group = fsdp1.shard_group(unit)
    finish = (lambda: local.clone() if local is shard else local) if group is None else _all_gather(local, group)
    views: list[torch.Tensor] = []

    def view(index: int) -> torch.Tensor:
        if not views:
            views.extend(fsdp1.original_views(unit, finish()))
        return views[index]

    return [partial(view, index) for index in range(len(fsdp1.original_parameters(flat)))]


def _all_gather(local: torch.Tensor, group: dist.ProcessGroup) -> Finish:
    whole = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
    all_gather: Any = (
        getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    )  # the name in older versions
    work = all_gather(whole, local, group=group, async_op=True)

    def finish() -> torch.Tensor:
        work.wait()
        return whole

    return finish
