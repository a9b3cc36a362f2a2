"""A simulated accelerator: a device type of PyTorch (PrivateUse1) whose memory is host memory.

A process has the device if this package's folder is in its PYTHONPATH: torch imports the package by its entry point.
torch, Accelerate, Transformers and the code under test run on it unchanged. It has the name of an accelerator that
these libraries know, ``npu``, or another one (:mod:`torch_npu.settings`, which lists all environment variables).
Operators run on CPU tensors with the same memory, collectives on gloo, so results are those of CPU ranks. Operations
run when they are started, in the order of the program; what a real device would do later is only simulated.

It shows:

- **races**: two streams use the same memory, at least one of them writes, and no event, ``wait_stream``, ``wait()`` of
  a collective or synchronization orders them. Collectives run on a stream of their process group.
- **memory that is freed too early**: it is used again while another stream may still use it, and ``record_stream`` was
  not called.
- **late copies**: a non-blocking copy to pinned memory arrives when the host has waited for it; until then the memory
  contains NaN. Pinned memory that changes before its copy to the device is complete is reported.
- **host waits**: :class:`HostWaits` lists what makes the host wait: blocking copies, copies of pageable memory,
  ``item()``, operators whose result has a size that depends on data, barriers, synchronization of streams, events and
  devices.
- **memory**: statistics in multiples of 512 bytes, and ``torch.OutOfMemoryError`` above a limit.
- **wrong devices**: operators on tensors of different devices fail as they do for CUDA.
- random number generators of each device, autocast, visible devices. Use in a process that was forked after the first
  use of the device fails, as with CUDA.

:func:`take_findings` returns the races and the other errors, which are also printed to stderr.

It does not show: speed; kernels and their accuracy; fragmentation and cache of the allocator, and the temporary memory
of kernels; NCCL's errors and hangs; races of two threads of the host, or of more than the last 512 uses of a block of
memory. Accesses are ranges of addresses: interleaved columns of one matrix count as the same memory. Sparse tensors,
the inductor of ``torch.compile``, captured graphs, and memory shared between processes are not supported.
"""

from __future__ import annotations

import atexit
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import settings
from .findings import Finding, HostWait, HostWaits, device, take_findings
from .library import C

__version__ = "2.13.0"
__all__ = [
    "Finding", "HostWait", "HostWaits", "num_late_copies", "physical_devices", "pin", "set_memory_limit",
    "take_findings", "unpin",
]  # fmt: skip


def autoload() -> None:
    """Called by torch when it is imported. The import of this package has done everything."""


def pin(memory: torch.Tensor) -> bool:
    """Page-lock existing CPU memory. Returns ``False`` if a part of it is page-locked."""
    return C.pin_memory(memory.data_ptr(), memory.numel() * memory.itemsize)


def unpin(memory: torch.Tensor) -> None:
    """Undo :func:`pin`.

    Raises:
        RuntimeError: the memory is not page-locked.
    """
    if not C.unpin_memory(memory.data_ptr()):
        raise RuntimeError("the memory is not page-locked")


def set_memory_limit(num_bytes: int, index: int = 0) -> None:
    """Set the memory of a device; allocations above it raise ``torch.OutOfMemoryError``."""
    C.set_memory_limit(index, num_bytes)


def num_late_copies() -> int:
    """Number of non-blocking copies that the host has not waited for."""
    return C.num_late_copies()


def physical_devices() -> tuple[int, ...]:
    """The devices of the machine that this process sees."""
    return settings.visible_devices()


def npu_fusion_attention(*args: Any, **kwargs: Any) -> Any:
    """Transformers imports this function if it finds the package."""
    raise NotImplementedError("the simulated accelerator has no fused attention")


npu_rotary_mul = npu_fused_infer_attention_score = npu_fusion_attention


def _new_process_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    return C.CollectivesBackend(dist.ProcessGroupGloo(store, rank, size, timeout), _COLLECTIVES)


_DEVICE_TYPE = settings.device_type()
_COLLECTIVES = settings.NAMES[_DEVICE_TYPE].collectives


def _before_exit() -> None:
    """Complete all copies: their tensors must not live longer than the allocators of this library."""
    device.disconnect()
    for index in range(C.num_devices()):
        torch.accelerator.synchronize(index)


def _register() -> None:
    from .device_module import make_module

    device.connect(C)
    atexit.register(_before_exit)
    make_module()
    if dist.is_available():
        dist.Backend.register_backend(_COLLECTIVES, _new_process_group, devices=[_DEVICE_TYPE])
    # Accelerate imports the package of a device type by this name.
    sys.modules.setdefault(f"torch_{_DEVICE_TYPE}", sys.modules[__name__])


_register()
