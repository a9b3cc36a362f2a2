"""Shards that are mapped from their files at first, and copied by a background thread.

A shard on the CPU with the dtype of its file needs no copy at once: it becomes a private mapping of its own bytes in
the file, which the system reads when they are used. So ``prepare`` waits neither for the disk nor for memory that is
written for the first time. But a mapping follows later changes of the file, and truncating the file takes even the
pages that the process has changed. Therefore a background thread copies the bytes to new memory. The first forward and
every save wait for it, and then move this memory to the addresses of the shards, with the pages that the script has
changed meanwhile. Afterwards the shards have nothing to do with the files.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from hf_fsdp_plugin.backends.bits import INTEGERS, sum_bits
from hf_fsdp_plugin.backends.file_views import FileView
from hf_fsdp_plugin.backends.memory_maps import changed_pages
from hf_fsdp_plugin.problems import CheckpointError, Origin, Problem
from hf_fsdp_plugin.progress import progress_bar

MIN_BYTES = 1 << 18
"""Smaller shards are copied: a mapping consists of whole pages, and a process may have some 65,000 mappings."""
_MAX_MAPPINGS = 20_000
_PIECE = 1 << 20
"""Bytes that are read and added at a time. They stay in the processor's cache meanwhile."""
_MOVE: Final = 1 | 2
"""``MREMAP_MAYMOVE | MREMAP_FIXED`` (``man 2 mremap``)."""
_FAILED: Final = ctypes.c_void_p(-1).value


class FileShards:
    """The mapped shards of one model on this rank. Map them, start the thread, and wait for it before they are used.

    Attributes:
        bit_sum: sum of the bits of the mapped bytes, as they are in the files; 0 until :meth:`wait` has returned.
    """

    def __init__(self) -> None:
        self.bit_sum = 0
        self._files: dict[str, _File] = {}
        self._mapped: list[_MappedShard] = []
        self._thread: threading.Thread | None = None
        self._num_read = 0
        self._problem: Problem | None = None

    def map(self, view: FileView, offset: int, part: torch.Tensor) -> torch.Tensor | None:
        """Return a tensor with the values of ``part``, mapped from its file; ``None`` if it has to be copied.

        Args:
            offset: position of the part in the view, in bytes.
        """
        is_large = part.nbytes >= MIN_BYTES and len(self._mapped) < _MAX_MAPPINGS
        is_possible = view.is_of_file_system and part.is_contiguous() and part.element_size() in INTEGERS
        file = self._open(view) if is_large and is_possible and sys.platform == "linux" else None
        if file is None:
            return None
        position = view.offset + offset
        before = position % mmap.PAGESIZE
        pages = _map(before + part.nbytes, file.descriptor, position - before)
        if pages is None:
            return None
        integers = INTEGERS[part.element_size()]
        self._mapped.append(_MappedShard(weakref.ref(pages.memory), file, position, part.nbytes, integers))
        flat = torch.frombuffer(pages.memory, dtype=torch.uint8, count=part.nbytes, offset=before)
        return flat.view(part.dtype).view(part.shape)

    def _open(self, view: FileView) -> _File | None:
        """Open the file of a view, if it is still the same."""
        if view.path in self._files:
            return self._files[view.path]
        try:
            file = _File(view.path, os.open(view.path, os.O_RDONLY | os.O_CLOEXEC), view.size, view.modified)
        except OSError:
            return None
        if file.is_changed():
            os.close(file.descriptor)
            return None
        self._files[view.path] = file
        return file

    def start(self) -> bool:
        """Start to copy the mapped shards in the background. Returns False if there are none."""
        if self._mapped:
            self._thread = threading.Thread(target=self._read, name="hf-fsdp-file-shards", daemon=True)
            self._thread.start()
        return self._thread is not None

    def wait(self) -> None:
        """Wait until all mapped shards are memory of this process. Not collective.

        Nothing else may write to the shards meanwhile.

        Raises:
            CheckpointError: a file was changed or could not be read.
        """
        if self._thread is None:
            return
        shown = 0
        with progress_bar("reading", sum(shard.num_bytes for shard in self._mapped)) as update:
            while self._thread.is_alive():
                self._thread.join(0.1)
                update(self._num_read - shown)
                shown = self._num_read
        if self._files:  # in a forked process, which has no such thread
            self._read()
        if self._problem is not None:
            raise CheckpointError([self._problem])
        for shard in self._mapped:
            try:
                shard.move_copy()
            except OSError as error:
                raise CheckpointError([_unreadable(shard.file, error)]) from None
        self._thread, self._mapped = None, []

    def __deepcopy__(self, memo: dict[int, Any]) -> FileShards:
        """Return the shards of a deep copy of the model, which has tensors of its own."""
        self.wait()
        copied = FileShards()
        copied.bit_sum = self.bit_sum
        return copied

    def _read(self) -> None:
        bit_sum = self._num_read = 0
        for shard in self._mapped:
            try:
                bit_sum += self._copy(shard)
            except OSError as error:
                self._problem = _unreadable(shard.file, error)
                break
        for file in self._files.values():
            if self._problem is None and file.is_changed():
                self._problem = _changed(file)
            os.close(file.descriptor)
        self.bit_sum, self._files = bit_sum, {}

    def _copy(self, shard: _MappedShard) -> int:
        """Copy a shard from its file to new memory. Returns the sum of its bits."""
        copy = _map(shard.before + shard.num_bytes)
        if copy is None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        bits, content = 0, memoryview(copy.memory).cast("B")[shard.before :]
        for start in range(0, shard.num_bytes, _PIECE):
            piece = content[start : start + _PIECE]
            if os.preadv(shard.file.descriptor, [piece], shard.position + start) < len(piece):
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
            bits += int(sum_bits([torch.frombuffer(piece, dtype=shard.integers)]) or 0)
            self._num_read += len(piece)
        shard.copy = copy if shard.memory() is not None else None
        return bits


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    descriptor: int
    size: int
    modified: int

    def is_changed(self) -> bool:
        status = os.fstat(self.descriptor)
        return (status.st_size, status.st_mtime_ns) != (self.size, self.modified)


@dataclass(slots=True)
class _MappedShard:
    """One shard.

    Attributes:
        memory: the mapped pages, which end with the tensor.
        file, position, num_bytes: the bytes of the tensor.
        integers: the integer type with the size of an element.
        copy: pages with the same bytes, which are memory of this process.
    """

    memory: weakref.ref[Any]
    file: _File
    position: int
    num_bytes: int
    integers: torch.dtype
    copy: _Pages | None = None

    @property
    def before(self) -> int:
        """Bytes of the first page before the tensor."""
        return self.position % mmap.PAGESIZE

    def move_copy(self) -> None:
        """Move the copy to the address of the tensor."""
        memory, copy = self.memory(), self.copy
        if memory is None or copy is None:
            return
        address, copied, size = ctypes.addressof(memory), ctypes.addressof(copy.memory), len(memory)
        for start, end in changed_pages(address, size):
            ctypes.memmove(copied + start, address + start, min(end, size) - start)
        if _libc().mremap(copied, size, size, _MOVE, ctypes.c_void_p(address)) == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        copy.free.detach()  # another mapping may get the address that it had
        self.copy = None


@dataclass(frozen=True, slots=True)
class _Pages:
    """Mapped pages, as an array of bytes, and what frees them when nothing refers to the array."""

    memory: Any
    free: weakref.finalize[..., Any]


def _map(size: int, descriptor: int = -1, offset: int = 0) -> _Pages | None:
    """Map bytes of a file privately; without a file, new memory. Returns ``None`` if it is not possible."""
    flags = mmap.MAP_PRIVATE | (mmap.MAP_ANONYMOUS if descriptor < 0 else 0)
    # Not Python's mmap, which keeps a file descriptor for each mapping.
    address = _libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset)
    if address == _FAILED:
        return None
    memory = (ctypes.c_char * size).from_address(address)
    free = weakref.finalize(memory, _libc().munmap, address, size)
    free.atexit = False
    return _Pages(memory, free)


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _changed(file: _File) -> Problem:
    return Problem(
        code="FSDP-E326",
        origin=Origin(source=file.path),
        message="the file was changed while its weights were read, so that they may be of both states.",
        fix="Start again when nothing writes to the file. Write new weights to another folder, or rename them into it.",
    )


def _unreadable(file: _File, error: OSError) -> Problem:
    reasons = {errno.EFAULT: "it has become shorter", errno.ENOMEM: "no memory is left"}
    return Problem(
        code="FSDP-E327",
        origin=Origin(source=file.path),
        message=f"the weights in the file could not be read: {reasons.get(error.errno or 0, error.strerror)}.",
        fix="Check that the file is complete, and the disk and the memory of the machine.",
    )
