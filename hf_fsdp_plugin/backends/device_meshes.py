"""Device meshes for the mesh sizes of a plan."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_fsdp_plugin.axes import (
    CONTEXT_AXIS,
    DATA_AXIS,
    DATA_CONTEXT_AXIS,
    REPLICATE_AXIS,
    SHARD_AXIS,
    SHARD_CONTEXT_AXIS,
    TENSOR_AXIS,
)
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, MeshPlan
from hf_fsdp_plugin.state import process
from hf_fsdp_plugin.torch_private.functions import (
    flatten_mesh,
    set_timeout,
    timeout_of,
)


def device_mesh(plan: FsdpPlan) -> DeviceMesh:
    """Return the mesh that FSDP shards over: 1-D, or 2-D (replicate x shard) if parameters are replicated.

    The ranks of a shard group are consecutive, so that the frequent all-gathers stay within a machine. With a context
    axis, the shard axis is the shard and context axes of :func:`world_mesh` together.
    """
    replicas = [REPLICATE_AXIS] if plan.has_replicas else []
    world = world_mesh(plan.mesh, plan.device_type, has_replicas=plan.has_replicas)
    if plan.mesh.context == 1:
        return world
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of a joint axis beside others
        return world[(*replicas, SHARD_CONTEXT_AXIS)]


def world_mesh(sizes: MeshPlan, device_type: str, *, has_replicas: bool) -> DeviceMesh:
    """Return the mesh of all ranks with Accelerate's names of its axes. Collective at the first call for each mesh.

    All models of a process that have the same mesh get the same object: the axes of a mesh have process groups, which
    own a communicator (NCCL: GPU memory) and threads (gloo) until the end of the process. With a context or tensor
    axis, the mesh has the joint axes that Accelerate, the Trainer and scripts look up.
    """
    replicas = {REPLICATE_AXIS: sizes.replicate} if has_replicas else {}
    axes = {**replicas, SHARD_AXIS: sizes.shard}
    if sizes.context > 1:
        axes[CONTEXT_AXIS] = sizes.context
    if sizes.tensor > 1:
        axes[TENSOR_AXIS] = sizes.tensor
    return _meshes().get(device_type, axes)


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
            self._created[key] = self._create(device_type, axes)
        return self._created[key]

    def _create(self, device_type: str, axes: Mapping[str, int]) -> DeviceMesh:
        mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        meshes = [mesh]
        if axes.keys() & {CONTEXT_AXIS, TENSOR_AXIS}:
            data = [name for name in axes if name in (REPLICATE_AXIS, SHARD_AXIS)]
            context = [name for name in axes if name == CONTEXT_AXIS]
            joint = {DATA_AXIS: data, SHARD_CONTEXT_AXIS: [SHARD_AXIS, *context], DATA_CONTEXT_AXIS: [*data, *context]}
            meshes += [flatten_mesh(mesh[tuple(names)], joined) for joined, names in joint.items()]
        # torch gives new groups its default, not that of `ddp_timeout`.
        if (timeout := timeout_of()) is not None:
            for group in {group for each in meshes for group in each.get_all_groups()}:
                set_timeout(timeout, group)
        return mesh


_meshes = process.owns(_Meshes, kept=True)
