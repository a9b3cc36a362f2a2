"""Converts the dtype names and mesh sizes of a plan to torch's dtypes and device meshes."""

from __future__ import annotations

from typing import Final

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_fsdp_plugin.plan.model import FsdpPlan, PlannedDtype
from hf_fsdp_plugin.strategies import STRATEGIES

REPLICATE_AXIS: Final = "dp_replicate"
SHARD_AXIS: Final = "dp_shard"
"""Accelerate's names for the axes of the mesh."""

_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "unchanged": None}


def torch_dtype(name: PlannedDtype) -> torch.dtype | None:
    """Return the torch dtype of a planned dtype; ``None`` for ``unchanged``, which means no cast."""
    return _DTYPES[name]


def device_mesh(plan: FsdpPlan) -> DeviceMesh:
    """Return a 1-D mesh with a shard axis, or a 2-D mesh (replicate x shard) if parameters are replicated.

    The ranks of a shard group are consecutive, so that the frequent all-gathers stay within a machine.
    """
    strategy = STRATEGIES[plan.strategy]
    if plan.mesh.replicate == 1 and strategy.is_sharded and not strategy.hybrid:
        return init_device_mesh(plan.device_type, (plan.mesh.shard,), mesh_dim_names=(SHARD_AXIS,))
    shape = (plan.mesh.replicate, plan.mesh.shard)
    return init_device_mesh(plan.device_type, shape, mesh_dim_names=(REPLICATE_AXIS, SHARD_AXIS))
