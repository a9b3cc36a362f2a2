"""Device meshes: the planned axis sizes laid over the ranks of the process group."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.strategies import STRATEGIES

# Accelerate's names for these axes, so that its code and ours mean the same by them.
REPLICATE_AXIS = "dp_replicate"
SHARD_AXIS = "dp_shard"


def device_mesh(plan: FsdpPlan) -> DeviceMesh:
    """A 1-D mesh of the shard axis, or a 2-D mesh (replicate x shard) where parameters are replicated.

    Neighbouring ranks share a shard group: the frequent all-gathers then stay inside a machine.
    """
    strategy = STRATEGIES[plan.strategy]
    if plan.mesh.replicate == 1 and strategy.is_sharded and not strategy.hybrid:
        return init_device_mesh(plan.device_type, (plan.mesh.shard,), mesh_dim_names=(SHARD_AXIS,))
    shape = (plan.mesh.replicate, plan.mesh.shard)
    return init_device_mesh(plan.device_type, shape, mesh_dim_names=(REPLICATE_AXIS, SHARD_AXIS))
