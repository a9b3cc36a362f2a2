"""Torch's dtypes and device meshes for the dtype names and mesh sizes of a plan, and tensors in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, PlannedDtype
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.torch_private.functions import tree_map_only, with_local_tensor
from hf_fsdp_plugin.torch_private.process_groups import set_timeout, timeout_of

REPLICATE_AXIS: Final = "dp_replicate"
SHARD_AXIS: Final = "dp_shard"
"""Accelerate's names for the axes of the mesh."""

_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "unchanged": None}


def torch_dtype(name: PlannedDtype) -> torch.dtype | None:
    """Return the torch dtype of a planned dtype; ``None`` for ``unchanged``, which means no cast."""
    return _DTYPES[name]


def cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    """Return inputs or outputs of a module with their floating-point tensors in ``dtype``; unchanged for ``None``."""
    if dtype is None:
        return tree
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


def dtensor_like(local: torch.Tensor, other: DTensor) -> DTensor:
    """Return a ``DTensor`` with this rank's shard ``local``, laid out like ``other``. No communication.

    The shard stays on its device, which is the CPU for offloaded parameters: ``DTensor.from_local`` copies it to the
    device of the mesh.
    """
    empty = local.detach().to("meta")
    layout = DTensor.from_local(
        empty, other.device_mesh, other.placements, run_check=False, shape=other.shape, stride=other.stride()
    )
    return with_local_tensor(layout, local)


def shard_like(parameter: DTensor, whole: torch.Tensor) -> DTensor:
    """Return this rank's shard of a whole tensor, laid out like ``parameter``. No communication."""
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def device_mesh(plan: FsdpPlan) -> DeviceMesh:
    """Return a 1-D mesh with a shard axis, or a 2-D mesh (replicate x shard) if parameters are replicated.

    The ranks of a shard group are consecutive, so that the frequent all-gathers stay within a machine. All models of a
    process that have the same mesh get the same object: each 2-D mesh has two more process groups, which own a
    communicator (NCCL: GPU memory) and threads (gloo) until the end of the process.
    """
    strategy = STRATEGIES[plan.strategy]
    if plan.mesh.replicate == 1 and strategy.is_sharded and not strategy.hybrid:
        return _meshes.get(plan.device_type, {SHARD_AXIS: plan.mesh.shard})
    return _meshes.get(plan.device_type, {REPLICATE_AXIS: plan.mesh.replicate, SHARD_AXIS: plan.mesh.shard})


class _Meshes:
    """The meshes that were created since the default process group was."""

    def __init__(self) -> None:
        self._world: dist.ProcessGroup | None = None
        self._created: dict[tuple[str, tuple[tuple[str, int], ...]], DeviceMesh] = {}

    def get(self, device_type: str, axes: Mapping[str, int]) -> DeviceMesh:
        """Return the mesh with these names and sizes. Collective at the first call for each mesh."""
        if self._world is not dist.group.WORLD:
            self._world, self._created = dist.group.WORLD, {}
        key = (device_type, tuple(axes.items()))
        if key not in self._created:
            mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
            # torch gives new groups its default (10 minutes for NCCL), not that of `ddp_timeout`.
            if (timeout := timeout_of()) is not None:
                for group in mesh.get_all_groups():
                    set_timeout(timeout, group)
            self._created[key] = mesh
        return self._created[key]


_meshes = _Meshes()
