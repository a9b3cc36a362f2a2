"""A file written from its first byte to its last, past the page cache where the file system lets us.

Pages that the cache has to find cost more than the disk does: on a cloud machine a copy through it (``cp``,
``copy_file_range``) keeps a core busy for three to eight times as long as a direct write of the same bytes takes, and
pushes out what others had there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from hf_fsdp_plugin.checkpoint.disk import DIRECT, PAGE, REFUSED

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
        self._descriptor = _open(self._path)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                size = self._position + self._filled
                self._flush()
                self._wait()
                os.ftruncate(self._descriptor, size)  # the last page was written whole
                os.fsync(self._descriptor)
        finally:
            self._worker.shutdown()
            os.close(self._descriptor)

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
        whole = -(-self._filled // PAGE) * PAGE
        self._pending = self._worker.submit(self._write, self._buffers[0][:whole], self._position)
        self._position += self._filled
        self._filled = 0
        self._buffers.reverse()

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()

    def _write(self, view: memoryview, offset: int) -> None:
        while view:
            try:
                count = os.pwrite(self._descriptor, view, offset)
            except OSError as error:
                if error.errno not in REFUSED or not _through_the_cache(self._descriptor):
                    raise
                continue
            view, offset = view[count:], offset + count


def _aligned() -> memoryview:
    memory = mmap.mmap(-1, BUFFER)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | DIRECT, 0o666)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        return os.open(path, flags, 0o666)


def _through_the_cache(descriptor: int) -> bool:
    """Give up direct writes of a file; False where they were given up before."""
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~DIRECT)
    return True
