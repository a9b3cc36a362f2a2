"""Bytes to disk: past the page cache where the file system lets us, hashed on the way, synced at the end.

A write through the page cache costs a core for as long as it lasts; an ``ODIRECT`` write of the same bytes costs next
to nothing, and leaves the cache to the training data.
"""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash

from hf_fsdp_plugin.checkpoint.formats.manifest import FileRange, FileRecord
from hf_fsdp_plugin.checkpoint.io import PAGE, OutputFile, round_up
from hf_fsdp_plugin.checkpoint.writing.buffers import aligned_bytes
from hf_fsdp_plugin.checkpoint.writing.images import Extent, FileImage, fill, on_accelerator, wait_for_copies

WINDOW = 32 << 20
"""Bytes written at a time."""
_windows: dict[bool, torch.Tensor] = {}


def stage(images: list[FileImage], memory: torch.Tensor) -> None:
    """Copy the images into ``memory``, one extent after the other; it must hold the sum of their spans."""
    at = 0
    for image in images:
        for extent in image.extents:
            part = memory[at : at + extent.span]
            _clear_gaps(part, extent)
            fill(part[extent.start - extent.origin :], extent, extent.start, extent.stop)
            at += extent.span
    wait_for_copies()


def write_staged(root: Path, images: list[FileImage], memory: torch.Tensor) -> list[FileRecord]:
    """Write what :func:`stage` has copied. Touches no tensor of the model."""
    records, at = [], 0
    for image in images:
        with _Target(root / image.path, image) as target:
            for extent in image.extents:
                part = memory[at : at + extent.span]
                for low in range(extent.origin, extent.stop, WINDOW):
                    high = min(low + WINDOW, extent.stop)
                    target.write(part[low - extent.origin :], max(low, extent.start), high)
                at += extent.span
        records.append(target.record)
    return records


def write_live(root: Path, images: list[FileImage]) -> list[FileRecord]:
    """Write the images straight from their tensors, through one window of memory."""
    window = _window(pinned=on_accelerator(images))
    records = []
    for image in images:
        with _Target(root / image.path, image) as target:
            for extent in image.extents:
                for low in range(extent.origin, extent.stop, WINDOW):
                    start, high = max(low, extent.start), min(low + WINDOW, extent.stop)
                    _clear_gaps(window, extent, low, high)
                    fill(window[start - low :], extent, start, high)
                    if window.is_pinned():
                        wait_for_copies()
                    target.write(window, start, high)
        records.append(target.record)
    return records


def _window(*, pinned: bool) -> torch.Tensor:
    if pinned not in _windows:
        _windows[pinned] = aligned_bytes(WINDOW, pinned=pinned)
    return _windows[pinned]


def _clear_gaps(memory: torch.Tensor, extent: Extent, low: int | None = None, high: int | None = None) -> None:
    """Zeros between the items: memory is used again, and a file must not hold what stood there before."""
    low = extent.origin if low is None else low
    high = extent.origin + extent.span if high is None else high
    before = extent.origin
    for start, stop in [*((item.offset, item.stop) for item in extent.items), (extent.origin + extent.span,) * 2]:
        gap = (max(before, low), min(start, high))
        if gap[0] < gap[1]:
            memory[gap[0] - low : gap[1] - low].zero_()
        before = stop


class _Target:
    """One file being written and hashed."""

    def __init__(self, path: Path, image: FileImage) -> None:
        self._path, self._image = path, image
        self._ranges = _Ranges(image)

    def __enter__(self) -> _Target:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Another rank may have created a shared file already; the first one gives it its size.
        self._file = OutputFile(self._path)
        try:
            self._file.resize(self._image.size)
        except OSError:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                if not self._image.shared:  # the last page was written whole
                    self._file.resize(self._image.size)
                self._file.sync()
        finally:
            self._file.close()

    def write(self, memory: torch.Tensor, start: int, stop: int) -> None:
        """Write file bytes ``[start, stop)``; the page of ``start`` begins at the first byte of ``memory``."""
        origin = start // PAGE * PAGE
        view = memoryview(memory.numpy().data)
        self._ranges.update(view[start - origin : stop - origin], start)
        low, high = round_up(start), stop // PAGE * PAGE
        if not self._image.shared:
            # No other rank writes to these pages, and the file is cut to its size at the end.
            low, high = origin, round_up(stop)
        if low >= high:
            low = high = stop
        for first, last in ((min(start, low), low), (low, high), (high, stop)):
            if first < last:
                self._file.write(view[first - origin : last - origin], first)

    @property
    def record(self) -> FileRecord:
        return FileRecord(path=self._image.path, size=self._image.size, ranges=self._ranges.finished())


class _Ranges:
    """A hash for every item, with the gap after it; ranges so tile what the rank writes."""

    def __init__(self, image: FileImage) -> None:
        self._bounds: list[tuple[int, int, str]] = []
        for extent in image.extents:
            starts = [extent.start, *(item.offset for item in extent.items[1:]), extent.stop]
            self._bounds += [(a, b, item.name) for a, b, item in zip(starts, starts[1:], extent.items, strict=False)]
        self._done: list[FileRange] = []
        self._hasher = xxhash.xxh3_128()

    def update(self, view: memoryview, start: int) -> None:
        at, stop = start, start + len(view)
        while at < stop:
            low, high, name = self._bounds[len(self._done)]
            end = min(stop, high)
            self._hasher.update(view[at - start : end - start])
            if end == high:
                self._done.append(FileRange(start=low, stop=high, hash=self._hasher.hexdigest(), name=name))
                self._hasher = xxhash.xxh3_128()
            at = end

    def finished(self) -> tuple[FileRange, ...]:
        assert len(self._done) == len(self._bounds), "every item was written"
        return tuple(self._done)
