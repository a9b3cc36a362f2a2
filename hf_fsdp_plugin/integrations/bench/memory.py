"""Peak memory of a rank above what it held before a model was built."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from pathlib import Path

import torch

from hf_fsdp_plugin.devices import Device

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


class PeakMemory:
    """On accelerators, bytes of tensors in the allocator; on the CPU, resident memory of the process (Linux only)."""

    def __init__(self, device: Device) -> None:
        self._device = device

    @property
    def source(self) -> str:
        return "resident memory" if self._device.type == "cpu" else self._device.peak_source

    def free(self) -> int | None:
        """Return unused memory to the system or device, and return what is held; ``None`` if that is unknown."""
        gc.collect()
        if self._device.type != "cpu":
            module = torch.get_device_module(self._device.type)
            module.empty_cache()
            return int(module.memory_allocated())
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc keeps freed memory, which later cases would use unseen
        return _resident("VmRSS")

    def reset(self) -> None:
        """Begin a new peak. Without this function of the system, the peak is that of the process."""
        if self._device.type != "cpu":
            module = torch.get_device_module(self._device.type)
            module.reset_peak_memory_stats()
            return
        with contextlib.suppress(OSError):
            _RESET.write_text("5")  # proc(5): resets the peak resident set size

    def peak(self) -> int | None:
        return _resident("VmHWM") if self._device.type == "cpu" else self._device.peak_memory()


def _resident(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
