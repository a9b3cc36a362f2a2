"""A file written from its first byte to its last, past the page cache where the file system lets us.

Pages that the cache has to find cost more than the disk does: on a cloud machine a copy through it (``cp``,
``copy_file_range``) keeps a core busy for three to eight times as long as a direct write of the same bytes takes, and
pushes out what others had there.
"""

from __future__ import annotations

import contextlib
import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from hf_fsdp_plugin.checkpoint.io import OutputFile, round_up

BUFFER = 16 << 20
"""Bytes of each of the two buffers: one is filled while the other is written."""


class FileWriter:
    """Fill :meth:`room`, then :meth:`advance`, until all is written; on leaving, the file is synced to the disk."""

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
                self._file.resize(size)  # the last page was written whole
                self._file.sync()
        finally:
            self._worker.shutdown()
            self._file.close()

    def room(self) -> memoryview:
        """Where the next bytes go; never empty."""
        return self._buffers[0][self._filled :]

    def advance(self, count: int) -> None:
        """The first ``count`` bytes of the room hold what is to be written."""
        self._filled += count
        if self._filled == BUFFER:
            self._flush()

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            room = self.room()
            count = min(len(room), len(view))
            room[:count] = view[:count]
            self.advance(count)
            view = view[count:]

    def _flush(self) -> None:
        self._wait()
        whole = self._buffers[0][: round_up(self._filled)]
        self._pending = self._worker.submit(self._file.write, whole, self._position)
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
