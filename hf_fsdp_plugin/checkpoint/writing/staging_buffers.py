"""Page-aligned CPU memory for the bytes of shards, pinned for copies from an accelerator, which saves use again.

Page faults in new memory take ten times as long as the copy from the model.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

from hf_fsdp_plugin.checkpoint.file_io import PAGE, round_up
from hf_fsdp_plugin.devices import available_device

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23  # Linux 2.6.38 and 5.14; if madvise fails, pages are zeroed instead
_STEP = 64 << 20
_PINNED = "_hf_fsdp_pinned"
"""Attribute of memory that :func:`_pin` has pinned."""
PIECE = 256 << 20
"""Bytes that are pinned at a time. Kernels of the rank cannot be launched meanwhile.

A copy from or to an accelerator must not cross from one piece to the next: CUDA refuses a range of two registrations.
"""


def allocate_aligned(size: int, *, pinned: bool = False) -> torch.Tensor:
    """Allocate ``size`` bytes of page-aligned memory as a uint8 tensor, pinned for copies from an accelerator."""
    # Shared memory, although its pages are small: after a fork, a write to private memory would move it to other pages,
    # while the accelerator still copies to the pinned ones.
    memory = mmap.mmap(-1, round_up(max(size, 1)))
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    _advise(tensor.data_ptr(), tensor.numel(), _MADV_HUGEPAGE)
    if pinned:
        # Prefaulted first, because the driver holds a lock of all its calls while it pins, and would allocate the pages
        # under it. torch's pool of pinned memory is not used, because it rounds sizes up to powers of two.
        allocate_pages(tensor)
        if not _pin(tensor) and (allocated := _allocate_pinned(tensor.numel())) is not None:
            return allocated
    return tensor


def _allocate_pinned(size: int) -> torch.Tensor | None:
    """Allocate page-aligned memory in torch's pool, for devices that cannot pin other memory; ``None`` if it fails."""
    try:
        memory = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=True, device="cpu")
    except RuntimeError:  # the system limits locked memory
        return None
    start = -memory.data_ptr() % PAGE
    return memory[start : start + size]


def _pin(memory: torch.Tensor) -> bool:
    """Pin memory piece by piece. Returns whether all of it is pinned, or else none of it is."""
    pinned: list[torch.Tensor] = []
    for piece in memory.split(PIECE):
        if not available_device().pin(piece):
            for before in pinned:
                available_device().unpin(before)
            return False
        pinned.append(piece)
    setattr(memory, _PINNED, True)
    return True


def unpin(memory: torch.Tensor) -> None:
    """Unpin memory of :func:`allocate_aligned`, before the last reference to it is deleted and it is unmapped."""
    for piece in memory.split(PIECE) if getattr(memory, _PINNED, False) else ():  # not that of torch's pool
        available_device().unpin(piece)


def piece_sizes(into: torch.Tensor) -> list[int]:
    """Return the sizes of the parts of a slice of memory of :func:`allocate_aligned` that each are in one piece."""
    first = min(PIECE - int(into.storage_offset()) % PIECE, into.numel())
    rest = into.numel() - first
    return [first, *[PIECE] * (rest // PIECE), *([rest % PIECE] if rest % PIECE else [])]


def allocate_pages(memory: torch.Tensor) -> None:
    """Allocate all pages of ``memory``, in steps of 64 MiB so that waiting threads can run between them."""
    for start in range(0, memory.numel(), _STEP):
        part = memory[start : start + _STEP]
        if not _advise(part.data_ptr(), part.numel(), _MADV_POPULATE_WRITE):
            part[::PAGE].zero_()


def _advise(address: int, size: int, advice: int) -> bool:
    madvise = ctypes.CDLL(None).madvise  # ctypes releases the GIL during the call; mmap.madvise does not
    return madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(advice)) == 0


class StagingBuffers:
    """Numbered buffers that are used again, such as for the copies of this rank's shards while training continues."""

    def __init__(self) -> None:
        self._memory: dict[int, torch.Tensor] = {}

    def take(self, number: int, size: int, *, pinned: bool) -> torch.Tensor:
        """Return at least ``size`` bytes of memory: buffer ``number``, or a larger one in its place."""
        if number not in self._memory or self._memory[number].numel() < size:
            if number in self._memory:
                unpin(self._memory.pop(number))
            self._memory[number] = allocate_aligned(size, pinned=pinned)
        return self._memory[number]

    def missing(self, number: int, size: int) -> int:
        """Return the bytes by which :meth:`take` would enlarge a buffer."""
        held = self._memory[number].numel() if number in self._memory else 0
        return max(0, round_up(size) - held)

    def close(self) -> None:
        """Free all buffers."""
        for memory in self._memory.values():
            unpin(memory)
        self._memory.clear()
