"""Memory that files are put together in: page-aligned, so that writes may pass the page cache, and used again.

Memory that a process touches for the first time is what a copy out of the model costs (page faults take ten times
as long as the copy), so buffers are touched beside the training, by a thread that gives way to it, and kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading

import torch

from hf_fsdp_plugin.checkpoint.io import PAGE, round_up
from hf_fsdp_plugin.devices import available_device

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23  # Linux 2.6.38 and 5.14; elsewhere madvise fails and pages are touched
_STEP = 64 << 20


def aligned_bytes(size: int, *, pinned: bool = False) -> torch.Tensor:
    """``size`` bytes of page-aligned host memory as a uint8 tensor; pinned where copies come from a GPU."""
    memory = mmap.mmap(-1, round_up(max(size, 1)))
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    _advise(tensor.data_ptr(), tensor.numel(), _MADV_HUGEPAGE)
    if pinned:
        # Not allocated as pinned memory: torch's pool rounds sizes up to powers of two.
        available_device().pin(tensor)
    return tensor


def release(memory: torch.Tensor) -> None:
    """Before the last reference to :func:`aligned_bytes` goes: memory must not be unmapped while it is registered."""
    if memory.is_pinned():
        available_device().unpin(memory)


def touch(memory: torch.Tensor) -> None:
    """Have the system back all of ``memory`` now, in pieces, so that a waiting thread can take over between them."""
    for start in range(0, memory.numel(), _STEP):
        part = memory[start : start + _STEP]
        if not _advise(part.data_ptr(), part.numel(), _MADV_POPULATE_WRITE):
            part[::PAGE].zero_()


def _advise(address: int, size: int, advice: int) -> bool:
    try:
        madvise = ctypes.CDLL(None).madvise  # ctypes gives up the GIL for the call; mmap.madvise does not
    except (OSError, AttributeError):
        return False
    return madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(advice)) == 0


def give_way() -> None:
    """The calling thread runs where training leaves a core idle (Linux has priorities for threads)."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class Arena:
    """One buffer that holds a whole save of this rank while training goes on; kept from save to save."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None
        self._preparing: threading.Thread | None = None

    def prepare(self, size: int, *, pinned: bool) -> None:
        """Start to make ``size`` bytes ready, beside whatever the caller goes on with."""
        if self._preparing is not None or (self._memory is not None and self._memory.numel() >= size):
            return

        device = available_device()
        index = device.current_index() if pinned else 0

        def work() -> None:
            give_way()
            if pinned:  # A new thread starts on device 0, and pinning would create a context there.
                device.set_current(index)
            memory = aligned_bytes(size, pinned=pinned)
            touch(memory)
            self._replace(memory)

        self._preparing = threading.Thread(target=work, name="hf-fsdp-arena", daemon=True)
        self._preparing.start()

    def take(self, size: int, *, pinned: bool) -> torch.Tensor:
        """At least ``size`` bytes. Waits for :meth:`prepare`; what was prepared too small is replaced."""
        if self._preparing is not None:
            native = self._preparing.native_id
            if self._preparing.is_alive() and native is not None:
                with contextlib.suppress(OSError, AttributeError):  # only root may take a low priority back
                    os.setpriority(os.PRIO_PROCESS, native, 0)
            self._preparing.join()
            self._preparing = None
        if self._memory is None or self._memory.numel() < size:
            self._replace(None)  # before the next is made, not after
            self._replace(aligned_bytes(size, pinned=pinned))
        assert self._memory is not None
        return self._memory

    def _replace(self, memory: torch.Tensor | None) -> None:
        if self._memory is not None:
            release(self._memory)
        self._memory = memory
