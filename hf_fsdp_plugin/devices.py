"""The table of supported device types: one row of :data:`DEVICES` per type, with everything that depends on the type.

A type without a row works if its package registers a backend for collectives with torch, and ``torch.<type>`` has the
functions that are used here. Types with a row need neither; a subclass replaces functions that differ. Only methods
import torch, so that the launcher reads the table without loading torch. The launcher finds devices by
``_DEVICE_FILES`` in ``launcher/world.py``.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol

from hf_fsdp_plugin.problems import Problem, SpecError

if TYPE_CHECKING:
    import torch


class DeviceEvent(Protocol):
    """What is used of torch's events."""

    def record(self) -> None: ...

    def wait(self) -> None:
        """Let the current stream wait for the event."""

    def synchronize(self) -> None:
        """Wait for the event, in any thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The CPU, or an accelerator whose module in torch (``torch.xpu``) has the functions of ``torch.cuda``.

    Attributes:
        type: torch's name, such as ``cuda``.
        collectives: torch's name for the library of collectives on this device.
        visible_variable: environment variable that limits a process to some devices; empty if there is none.
        peak_source: what :meth:`peak_memory` measures.
    """

    type: str
    collectives: str
    visible_variable: str = ""
    peak_source: str = "process resident set"

    @property
    def _is_cpu(self) -> bool:
        return self.type == "cpu"

    @property
    def _module(self) -> Any:
        import torch

        return torch.get_device_module(self.type)

    @property
    def process_group_backend(self) -> str:
        """Backend for ``init_process_group`` that supports tensors of this device and CPU tensors."""
        return self.collectives if self._is_cpu else f"cpu:gloo,{self.type}:{self.collectives}"

    def is_initialized(self) -> bool:
        """Whether this process has used the device."""
        return self._is_cpu or (self._module.is_available() and self._module.is_initialized())

    def count(self) -> int:
        """Number of devices that this process sees; 0 for the CPU."""
        return 0 if self._is_cpu else self._module.device_count()

    def current_index(self) -> int:
        """Index of the calling thread's current device."""
        return 0 if self._is_cpu else self._module.current_device()

    def set_current(self, index: int) -> None:
        """Make ``index`` the calling thread's current device. A new thread starts on device 0."""
        self._module.set_device(index)

    def synchronize(self) -> None:
        """Wait for all kernels and copies on the current device."""
        self._module.synchronize()

    def record_event(self) -> DeviceEvent:
        """Return an event after the kernels and copies that were started so far on the current stream."""
        event: DeviceEvent = self._module.Event()
        event.record()
        return event

    def new_stream(self) -> contextlib.AbstractContextManager[object]:
        """Return a block in which the calling thread's current stream is another one."""
        return self._module.stream(self._module.Stream())

    def pin(self, memory: torch.Tensor) -> bool:
        """Page-lock existing CPU memory. Returns ``False`` if that is impossible; copies are then slower."""
        return False

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo :meth:`pin`. Required before the memory is unmapped."""

    def peak_memory(self) -> int:
        """Largest number of bytes in use so far, as measured by ``peak_source``."""
        if not self._is_cpu:
            return self._module.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux reports KiB (getrusage(2))

    def reserved_memory(self) -> int:
        """Largest number of bytes that the allocator has reserved so far; 0 on the CPU, or if it is unknown."""
        with contextlib.suppress(AttributeError, RuntimeError):
            return 0 if self._is_cpu else int(self._module.max_memory_reserved())
        return 0

    def name(self) -> str:
        """Name of the current device, such as ``NVIDIA H200``; empty on the CPU, or if it is unknown."""
        if self._is_cpu:
            return ""
        with contextlib.suppress(AttributeError, RuntimeError):  # not every device type has these properties
            return str(self._module.get_device_properties(self.current_index()).name)
        return ""

    def timed_event(self) -> Any:
        """Return an event of an accelerator, as :meth:`record_event`, whose time can be read when it is complete."""
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def total_memory(self) -> int | None:
        """Memory of the current device in bytes, on the CPU that of the machine; ``None`` if it is unknown."""
        if self._is_cpu:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        try:
            return int(self._module.get_device_properties(self.current_index()).total_memory)
        except (AttributeError, RuntimeError):  # not every device type has these properties
            return None


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaDevice(Device):
    """NVIDIA and AMD. Only ``torch.cuda`` can page-lock memory that torch has not allocated (read from torch 2.13)."""

    def pin(self, memory: torch.Tensor) -> bool:
        code = int(self._module.cudart().cudaHostRegister(memory.data_ptr(), memory.numel() * memory.itemsize, 0))
        return self._check(code)

    def unpin(self, memory: torch.Tensor) -> None:
        self._check(int(self._module.cudart().cudaHostUnregister(memory.data_ptr())))

    def _check(self, code: int) -> bool:
        """Return whether a call of the runtime succeeded. If not, clear the error.

        The runtime keeps the error of a thread, and torch would raise it at the next launch of any kernel. torch has no
        function that clears it, but clears it when it raises it, so a kernel is launched here.
        """
        if code != 0:
            import torch

            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self.type)
        return code == 0


_VISIBLE_VARIABLES: Final[Mapping[str, str]] = {
    "npu": "ASCEND_RT_VISIBLE_DEVICES", "mlu": "MLU_VISIBLE_DEVICES", "musa": "MUSA_VISIBLE_DEVICES",
}  # fmt: skip
"""The variables of device types without a row, from the documents of their vendors."""
_ROWS: Final = (
    Device(type="cpu", collectives="gloo"),
    CudaDevice(type="cuda", collectives="nccl", visible_variable="CUDA_VISIBLE_DEVICES", peak_source="cuda allocator"),
    Device(type="xpu", collectives="xccl", visible_variable="ZE_AFFINITY_MASK", peak_source="xpu allocator"),
)
DEVICES: Final[Mapping[str, Device]] = {device.type: device for device in _ROWS}
"""Every supported device type, by torch's name for it."""


def accelerator_type() -> str:
    """Return torch's name for this process's accelerator, supported or not; ``cpu`` if there is none.

    Apple's GPU (``mps``) does not count, because torch has no collectives for it.
    """
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None or found.type == "mps" else found.type


def available_device() -> Device:
    """Return this process's accelerator, or the CPU if it has no supported accelerator.

    An unsupported accelerator is an error only in plans and in the launcher, because CPU ranks run on any machine.
    """
    device_type = accelerator_type()
    return DEVICES["cpu"] if unsupported_device(device_type) else get_device(device_type)


def select_device(local_rank: int) -> Device:
    """Make the accelerator of a rank the calling thread's current device, and return its type.

    A rank that sees only its own accelerator (``srun --gpus-per-task``) selects that one.
    """
    device = available_device()
    if device.type != "cpu":
        device.set_current(local_rank % device.count())
    return device


def get_device(device_type: str) -> Device:
    """Return a device type: its row, or a device made from what its package has registered with torch.

    Raises:
        SpecError: the device type is not supported.
    """
    if (problem := unsupported_device(device_type)) is not None:
        raise SpecError([problem])
    return DEVICES.get(device_type) or Device(
        type=device_type,
        collectives=_registered_collectives(device_type),
        visible_variable=_VISIBLE_VARIABLES.get(device_type, ""),
        peak_source=f"{device_type} allocator",
    )


def unsupported_device(device_type: str) -> Problem | None:
    """Return the reason why a device type is not supported; ``None`` if it is."""
    if device_type in DEVICES or (device_type != "mps" and _registered_collectives(device_type)):
        return None
    return Problem(
        code="FSDP-E301",
        message=f"device type {device_type!r} is not supported: no backend for collectives is registered for it. "
        f"Supported: {', '.join(DEVICES)}, and types whose package registers such a backend with torch.",
        fix="Run on a supported device type; use_cpu: true (--cpu) selects the CPU.",
    )


def _registered_collectives(device_type: str) -> str:
    """Return the backend for collectives that torch or another package has registered for a device type."""
    import torch.distributed as dist

    return str(dist.Backend.default_device_backend_map.get(device_type, "")) if dist.is_available() else ""


PEAK_FLOPS: Final[Mapping[str, float]] = MappingProxyType(
    {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
)
"""Part of the name of a device -> FLOP/s of dense matrix products in bf16, from the data sheets of NVIDIA."""


def peak_flops(device_name: str) -> float | None:
    """Return the FLOP/s of a device in bf16; ``None`` if they are unknown."""
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device_name), None)
