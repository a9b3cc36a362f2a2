"""Writes a file sequentially with direct I/O, from two buffers: one is filled while the other is written."""

from __future__ import annotations

import contextlib
import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from hf_fsdp_plugin.checkpoint.io import OutputFile, round_up

BUFFER = 16 << 20
"""Size of each of the two buffers in bytes."""


class FileWriter:
    """Writer of one file. Fill :meth:`free` and call :meth:`advance` repeatedly. Leaving the context syncs the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffers = [_aligned(), _aligned()]
        self._pending: Future[None] | None = None
        self._filled = 0
        self._position = 0

    def __enter__(self) -> FileWriter:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="hf-fsdp-write")
        self._file = OutputFile(self._path, truncate=True)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                size = self._position + self._filled
                self._flush()
                self._wait()
                self._file.resize(size)  # the last write was padded to a whole page
                self._file.sync()
        finally:
            self._worker.shutdown()
            self._file.close()

    def free(self) -> memoryview:
        """Return the memory for the next bytes; it is never empty."""
        return self._buffers[0][self._filled :]

    def advance(self, count: int) -> None:
        """Mark the first ``count`` bytes of the free memory as filled."""
        self._filled += count
        if self._filled == BUFFER:
            self._flush()

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            free = self.free()
            count = min(len(free), len(view))
            free[:count] = view[:count]
            self.advance(count)
            view = view[count:]

    def _flush(self) -> None:
        self._wait()
        pages = self._buffers[0][: round_up(self._filled)]
        self._pending = self._worker.submit(self._file.write, pages, self._position)
        self._position += self._filled
        self._filled = 0
        self._buffers.reverse()

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()


def _aligned() -> memoryview:
    memory = mmap.mmap(-1, BUFFER)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
