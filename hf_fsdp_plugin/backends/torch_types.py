"""Torch's dtypes for the dtype names of a plan, tensors with the layout of others, and copies of tensors to a device.

Host memory is copied to an accelerator through page-locked memory, so that the host does not wait for each copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_fsdp_plugin.devices import available_device
from hf_fsdp_plugin.torch_private.functions import (
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
            self._other, self._wait_for_other = full, available_device().record_event().synchronize
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
