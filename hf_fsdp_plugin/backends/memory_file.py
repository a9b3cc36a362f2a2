"""A memory file (``man 2 memfd_create``) to which tensors are moved one by one, for other processes to map.

It has no size limit of ``/dev/shm``. Tensors in it are private views (copy-on-write): a change in place stays in the
process that makes it. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch

from hf_fsdp_plugin.backends.memory_maps import changed_pages

_ALIGNMENT = 64
_CHUNK = 64 << 20
"""Bytes that are mapped at once, unless a tensor is larger: Linux limits the number of mappings to 65,530."""


_TRIM = 32 << 20
"""Bytes after which the memory of moved tensors is returned to the system: glibc keeps freed blocks of up to 32 MB, and
those before glibc 2.39 are too short for the next aligned block of the same size."""


class MemoryFile:
    """Tensors in memory that can be shared. The offsets depend only on the order and the sizes of the tensors, unless
    tensors are changed before others are added.

    Raises:
        OSError: the system has no memory files, or no memory.
    """

    def __init__(self, name: str) -> None:
        self._file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._end = self._num_untrimmed = 0
        self._chunk: mmap.mmap | None = None
        self._chunk_offset = self._address = 0
        self._addresses: list[tuple[int, int, int]] = []

    def move(self, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Copy a CPU tensor to the file. Returns the offset of the copy in bytes, and a view of it.

        Raises:
            OSError: there is no memory.
            RuntimeError, TypeError: the dtype has no bytes.
        """
        flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        content = memoryview(flat)
        # This process would not see what is written to a page that it has a changed copy of.
        if self._end % mmap.PAGESIZE and changed_pages(self._address + self._end - self._chunk_offset, 1):
            self._end = -(-self._end // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._chunk is None or self._end + len(content) > self._chunk_offset + len(self._chunk):
            self._add_chunk(len(content))
        offset = self._end
        write_at(self._file, content, offset)
        self._end += -(-max(len(content), 1) // _ALIGNMENT) * _ALIGNMENT
        self._num_untrimmed += len(content)
        if self._num_untrimmed > _TRIM:
            return_freed_memory()
            self._num_untrimmed = 0
        return offset, view_of(self._chunk, offset - self._chunk_offset, tensor.shape, tensor.dtype)

    def _add_chunk(self, num_bytes: int) -> None:
        unit = mmap.ALLOCATIONGRANULARITY
        self._end = self._chunk_offset = -(-self._end // unit) * unit
        length = max(_CHUNK, -(-num_bytes // unit) * unit)
        os.ftruncate(self._file, self._chunk_offset + length)
        self._chunk = mmap.mmap(self._file, length, access=mmap.ACCESS_COPY, offset=self._chunk_offset)
        self._address = torch.frombuffer(self._chunk, dtype=torch.uint8).data_ptr()
        self._addresses.append((self._address, self._address + length, self._chunk_offset))

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return the offset of a contiguous tensor that is in the file; ``None`` for others. Its bytes may differ."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or not tensor.nbytes:
            return None
        first = tensor.data_ptr()
        found = (offset + first - start for start, end, offset in self._addresses if start <= first < end)
        return next(found, None)

    def seal(self, text: bytes) -> tuple[int, int]:
        """Append a text, and make the file immutable, so that no process can change the weights of another one.

        Returns:
            The file, which the caller closes, and the bytes of the tensors, after which the text begins.
        """
        import fcntl

        os.ftruncate(self._file, self._end + len(text))
        write_at(self._file, memoryview(text), self._end)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)
        file, self._file = self._file, -1
        return_freed_memory()
        return file, self._end

    def close(self) -> None:
        """Close the file. Its tensors stay valid."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def return_freed_memory() -> None:
    """Return the memory of freed tensors to the system."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def write_at(file: int, content: memoryview, offset: int) -> None:
    while len(content):
        written = os.pwrite(file, content[: 1 << 30], offset)
        content, offset = content[written:], offset + written


def map_privately(file: int, size: int) -> mmap.mmap | None:
    """Map a file privately. The mapping is released with the last tensor that is a view of it."""
    return mmap.mmap(file, size, access=mmap.ACCESS_COPY) if size else None


def view_of(memory: mmap.mmap | None, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor at a byte offset of a mapping."""
    num_bytes = dtype.itemsize
    for length in shape:
        num_bytes *= length
    if memory is None or not num_bytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset).view(dtype).view(shape)
