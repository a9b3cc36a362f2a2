"""Torch's dtypes and device meshes for the dtype names and mesh sizes of a plan, and copies of tensors to a device.

Host memory is copied to an accelerator through page-locked memory, so that the host does not wait for each copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_fsdp_plugin.axes import (
    CONTEXT_AXIS,
    DATA_AXIS,
    DATA_CONTEXT_AXIS,
    REPLICATE_AXIS,
    SHARD_AXIS,
    SHARD_CONTEXT_AXIS,
    TENSOR_AXIS,
)
from hf_fsdp_plugin.devices import available_device
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, MeshPlan
from hf_fsdp_plugin.state import process
from hf_fsdp_plugin.torch_private.functions import (
    flatten_mesh,
    set_timeout,
    timeout_of,
    tree_map_only,
    with_local_tensor,
)

WINDOW: Final = 32 << 20
"""Bytes of one window of page-locked memory."""
_Key = TypeVar("_Key")
_ALIGNMENT: Final = 64
"""Offsets in a window are multiples of this, which is enough for elements of every dtype."""


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


class PinnedWindows:
    """Two windows of page-locked memory: the host fills one while the accelerator copies from the other.

    The host waits only before it fills a window again, which is once per ``WINDOW`` bytes. Copies run in the order of
    the current stream. For one thread.
    """

    def __init__(self) -> None:
        self._window: torch.Tensor | None = None
        self._used = 0
        self._other: torch.Tensor | None = None
        self._wait_for_other: Callable[[], None] | None = None

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return ``num_bytes`` of a window, at most ``WINDOW``, to fill and to copy from with ``non_blocking=True``."""
        if self._window is None or self._used + num_bytes > WINDOW:
            self._change_windows()
        assert self._window is not None
        start = self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._window[start : start + num_bytes]

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor in host memory to a tensor with its shape on the accelerator, which casts the elements."""
        if source.nbytes <= WINDOW:
            window = self.take(source.nbytes).view(source.dtype).view(source.shape)
            into.copy_(window.copy_(source), non_blocking=True)
            return
        dim = max(range(source.dim()), key=source.size)
        num_parts = -(-source.nbytes // WINDOW)
        for part, of_source in zip(into.chunk(num_parts, dim), source.chunk(num_parts, dim), strict=True):
            self.copy(part, of_source)

    def _change_windows(self) -> None:
        full, wait = self._window, self._wait_for_other
        self._window, self._used = self._other, 0
        if full is not None:
            self._other, self._wait_for_other = full, available_device().record_event()
        if self._window is None:
            self._window = torch.empty(WINDOW, dtype=torch.uint8, pin_memory=True, device="cpu")
        elif wait is not None:
            wait()


def wait_for_reads(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until the device has read offloaded shards, before they are changed in host memory.

    A forward without a backward ends while the device still copies them. FSDP waits at the end of a backward only.
    """
    device = available_device()
    if device.type != "cpu" and device.is_initialized() and any(tensor.is_pinned() for tensor in tensors):
        device.synchronize()


def copy_to_device(tensor: torch.Tensor, device: torch.device, windows: PinnedWindows) -> torch.Tensor:
    """Return a tensor on ``device``; the tensor itself if it is there."""
    # The copy of a subclass may consist of several tensors.
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or device.type == "cpu" or not tensor.nbytes:
        return tensor.to(device)
    copied = torch.empty_like(tensor, device=device)
    windows.copy(copied, tensor)
    return copied


def move_scalars(scalars: Mapping[_Key, torch.Tensor], device: torch.device) -> dict[_Key, torch.Tensor]:
    """Return scalars on ``device``, with one copy per device and dtype: the host waits for no single one."""
    groups: dict[tuple[torch.device, torch.dtype], dict[_Key, torch.Tensor]] = {}
    for key, scalar in scalars.items():
        groups.setdefault((scalar.device, scalar.dtype), {})[key] = scalar.detach()
    moved: dict[_Key, torch.Tensor] = {}
    for group in groups.values():
        values = copy_to_device(torch.stack(list(group.values())), device, PinnedWindows())
        moved.update(zip(group, (value.clone() for value in values), strict=True))
    return moved
