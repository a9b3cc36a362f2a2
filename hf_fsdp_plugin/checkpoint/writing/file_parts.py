"""The parts of files that one rank writes: their description before anything is written, and the writer.

A part is either written directly from the tensors, window by window, or copied as a whole to a staging buffer and
written from the buffer during training. Both use :func:`copy_extent`. Writes bypass the page cache if the file system
supports that; each range is hashed while it is written.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from hf_fsdp_plugin.checkpoint.formats.manifest import MAX_RANGE, FileRange, FileRecord
from hf_fsdp_plugin.checkpoint.io import PAGE, OutputFile, round_up
from hf_fsdp_plugin.checkpoint.writing.buffers import allocate_aligned, piece_sizes, unpin
from hf_fsdp_plugin.devices import DEVICES, available_device
from hf_fsdp_plugin.messages import progress_bar

Content = bytes | torch.Tensor


@dataclass(frozen=True, slots=True)
class Item:
    """A byte range that has its own hash in the manifest.

    Attributes:
        offset: byte offset in the file.
        contents: bytes and tensors, one after the other. Tensors are written as their bytes in row-major order.
        name: name of the tensor in the range, for the message if the range is damaged.
    """

    offset: int
    contents: tuple[Content, ...]
    name: str = ""

    @property
    def size(self) -> int:
        return sum(num_bytes(content) for content in self.contents)

    @property
    def stop(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous byte range ``[start, stop)`` that one rank writes. Its items follow each other without gaps."""

    start: int
    stop: int
    items: tuple[Item, ...]

    @property
    def origin(self) -> int:
        """File offset of the first byte of the aligned buffer that holds the extent."""
        return self.start // PAGE * PAGE

    @property
    def span(self) -> int:
        """Size in bytes of the aligned buffer that holds the extent."""
        return round_up(self.stop - self.origin)

    def items_from(self, offset: int) -> Iterator[Item]:
        """Yield the items from the first one that ends after a file offset."""
        first = bisect.bisect_right(self.items, offset, key=lambda item: item.stop)
        return itertools.islice(self.items, first, None)

    def windows(self) -> Iterator[tuple[int, int, int]]:
        """Yield the offset of the first page of each window, and the range of the bytes in it."""
        for low in range(self.origin, self.stop, WINDOW):
            yield low, max(low, self.start), min(low + WINDOW, self.stop)


@dataclass(frozen=True, slots=True)
class FilePart:
    """The part of one file that this rank writes.

    Attributes:
        path: path relative to the checkpoint, separated by ``/``.
        size: size of the whole file in bytes.
        shared: whether other ranks write to the file too.
    """

    path: str
    size: int
    extents: tuple[Extent, ...]
    shared: bool = False

    @property
    def span(self) -> int:
        """Size in bytes of the aligned memory that holds all extents."""
        return sum(extent.span for extent in self.extents)


def whole_file(path: str, items: Iterable[Item]) -> FilePart:
    """Return the part for a file that only this rank writes, from its first to its last byte."""
    (extent,) = _extents(items) or (Extent(0, 0, ()),)
    return FilePart(path, extent.stop, (extent,) if extent.stop else ())


def shared_file(path: str, size: int, items: Iterable[Item]) -> FilePart:
    """Return the part with this rank's items of a file of ``size`` bytes."""
    return FilePart(path, size, _extents(items), shared=True)


def _extents(items: Iterable[Item]) -> tuple[Extent, ...]:
    """Return the items in the order of their bytes. Adjacent items become one extent."""
    runs: list[list[Item]] = []
    for item in sorted(items, key=lambda item: item.offset):
        if runs and runs[-1][-1].stop == item.offset:
            runs[-1].append(item)
        else:
            runs.append([item])
    return tuple(Extent(run[0].offset, run[-1].stop, tuple(run)) for run in runs)


def num_bytes(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else content.numel() * content.element_size()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in row-major order, without a copy if it is contiguous."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def copy_extent(target: torch.Tensor, extent: Extent, start: int, stop: int) -> None:
    """Copy the extent's bytes ``[start, stop)`` (file offsets) to ``target``.

    Copies from an accelerator are asynchronous: call :func:`wait_for_copies`, or what :func:`record_copies` returns,
    before the bytes are used.
    """
    for item in extent.items_from(start):
        if item.offset >= stop:
            break
        offset = item.offset
        for content in item.contents:
            low, high = max(offset, start), min(offset + num_bytes(content), stop)
            if low < high:
                if isinstance(content, bytes):
                    source = torch.frombuffer(bytearray(content[low - offset : high - offset]), dtype=torch.uint8)
                else:
                    source = bytes_of(content)[low - offset : high - offset]
                into = target[low - start : high - start]
                sizes = piece_sizes(into)
                for part, of_source in zip(into.split(sizes), source.split(sizes), strict=True):
                    part.copy_(of_source, non_blocking=True)
            offset += num_bytes(content)


def on_accelerator(parts: Iterable[FilePart]) -> bool:
    """Whether any tensor has to be copied from an accelerator."""
    return any(
        isinstance(content, torch.Tensor) and content.device.type != "cpu"
        for part in parts
        for extent in part.extents
        for item in extent.items
        for content in item.contents
    )


def wait_for_copies() -> None:
    """Wait for the copies that :func:`copy_extent` started, and not for other streams of the device."""
    if available_device().is_initialized():
        record_copies()()


def record_copies() -> Callable[[], None]:
    """Return a function that waits for the copies that :func:`copy_extent` has started so far, but not for later ones.

    Any thread may call it.
    """
    device = available_device()
    index, wait = device.current_index(), device.record_event()

    def wait_in_any_thread() -> None:
        device.set_current(index)  # a new thread starts on device 0, where the wait would create a context
        wait()

    return wait_in_any_thread


WINDOW = 32 << 20
"""Number of bytes per write."""


_Window = tuple[torch.Tensor, int, int]
"""Memory that begins with a page of a file, and the range of the file's bytes that is written from it."""


class PartWriter:
    """Writes file parts to a folder, and keeps its memory for later parts."""

    def __init__(self) -> None:
        self._windows: dict[bool, list[torch.Tensor]] = {}  # key: whether the memory is pinned

    def write(self, root: Path, parts: Sequence[FilePart]) -> list[FileRecord]:
        """Write parts directly from their tensors, through windows of memory."""
        total = sum(extent.stop - extent.start for part in parts for extent in part.extents)
        pinned = on_accelerator(parts)
        with progress_bar("saving", total) as update:
            return [_write_part(root, part, self._filled(part, pinned=pinned), update) for part in parts]

    def write_staged(self, root: Path, parts: Sequence[FilePart], memory: torch.Tensor) -> list[FileRecord]:
        """Write the parts that :func:`copy_parts` has copied to ``memory``. Does not access the model's tensors."""
        records = []
        for part in parts:
            records.append(_write_part(root, part, _staged(part, memory)))
            memory = memory[part.span :]
        return records

    def _filled(self, part: FilePart, *, pinned: bool) -> Iterator[_Window]:
        """Yield windows that contain the bytes of the file. The memory is reused after the next one.

        From an accelerator, the next window is copied while the caller writes this one.
        """
        memory = itertools.cycle(self._windows_of(pinned=pinned))
        pending: tuple[_Window, Callable[[], None]] | None = None
        try:
            for extent in part.extents:
                for low, start, stop in extent.windows():
                    window = next(memory), start, stop
                    copy_extent(window[0][start - low :], extent, start, stop)
                    if not pinned:
                        yield window
                        continue
                    before, pending = pending, (window, record_copies())
                    if before is not None:
                        before[1]()
                        yield before[0]
            if pending is not None:
                pending[1]()
                yield pending[0]
        finally:
            if pinned:  # the caller may have failed to write
                wait_for_copies()

    def close(self) -> None:
        """Free the memory."""
        for window in (window for windows in self._windows.values() for window in windows):
            unpin(window)
        self._windows.clear()

    def _windows_of(self, *, pinned: bool) -> list[torch.Tensor]:
        if pinned not in self._windows:
            self._windows[pinned] = [allocate_aligned(WINDOW, pinned=pinned) for _ in range(1 + pinned)]
        return self._windows[pinned]


def copy_parts(parts: Sequence[FilePart], memory: torch.Tensor) -> Callable[[], None]:
    """Copy all extents one after the other to ``memory``, which must have at least the sum of their spans.

    Returns:
        A function that waits until the copies are complete, for any thread. Until then, the current stream may change
        the tensors: it does so after the copies.
    """
    for extent in (extent for part in parts for extent in part.extents):
        copy_extent(memory[extent.start - extent.origin :], extent, extent.start, extent.stop)
        memory = memory[extent.span :]
    return record_copies() if on_accelerator(parts) else DEVICES["cpu"].record_event()


def _staged(part: FilePart, memory: torch.Tensor) -> Iterator[_Window]:
    for extent in part.extents:
        for low, start, stop in extent.windows():
            yield memory[low - extent.origin : extent.span], start, stop
        memory = memory[extent.span :]


def _write_part(
    root: Path, part: FilePart, windows: Iterable[_Window], update: Callable[[int], object] = lambda _: None
) -> FileRecord:
    with _PartFile(root / part.path, part) as file:
        for memory, start, stop in windows:
            file.write(memory, start, stop)
            update(stop - start)
    return file.record


class _PartFile:
    """One file that is being written and hashed."""

    def __init__(self, path: Path, part: FilePart) -> None:
        self._path, self._part = path, part
        self._hashes = _RangeHashes(part)

    def __enter__(self) -> _PartFile:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Another rank may have created a shared file already, so it is not truncated.
        self._file = OutputFile(self._path)
        try:
            self._file.resize(self._part.size)
        except OSError:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                if not self._part.shared:  # the last write was padded to a whole page
                    self._file.resize(self._part.size)
                self._file.sync()
        finally:
            self._file.close()

    def write(self, memory: torch.Tensor, start: int, stop: int) -> None:
        """Write file bytes ``[start, stop)``. ``memory`` begins with the page that contains ``start``."""
        origin = start // PAGE * PAGE
        view = memoryview(memory.numpy().data)
        self._hashes.update(view[start - origin : stop - origin], start)
        low, high = round_up(start), stop // PAGE * PAGE
        if not self._part.shared:
            # No other rank writes to these pages, and the file is truncated to its size at the end.
            low, high = origin, round_up(stop)
        if low >= high:
            low = high = stop
        for first, last in ((min(start, low), low), (low, high), (high, stop)):
            if first < last:
                self._file.write(view[first - origin : last - origin], first)

    @property
    def record(self) -> FileRecord:
        return FileRecord(path=self._part.path, size=self._part.size, ranges=self._hashes.finished())


class _RangeHashes:
    """Hashes of the items of a part, in ranges of at most ``MAX_RANGE`` bytes."""

    def __init__(self, part: FilePart) -> None:
        self._bounds: list[tuple[int, int, str]] = []
        for item in (item for extent in part.extents for item in extent.items):
            cuts = range(item.offset - item.offset % MAX_RANGE + MAX_RANGE, item.stop, MAX_RANGE)
            self._bounds += [
                (low, high, item.name) for low, high in itertools.pairwise((item.offset, *cuts, item.stop))
            ]
        self._done: list[FileRange] = []
        self._hasher = xxhash.xxh3_128()

    def update(self, view: memoryview, start: int) -> None:
        position, stop = start, start + len(view)
        while position < stop:
            low, high, name = self._bounds[len(self._done)]
            end = min(stop, high)
            self._hasher.update(view[position - start : end - start])
            if end == high:
                self._done.append(FileRange(start=low, stop=high, hash=self._hasher.hexdigest(), name=name))
                self._hasher = xxhash.xxh3_128()
            position = end

    def finished(self) -> tuple[FileRange, ...]:
        assert len(self._done) == len(self._bounds), "every item was written"
        return tuple(self._done)
