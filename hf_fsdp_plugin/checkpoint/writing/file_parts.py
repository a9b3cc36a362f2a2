"""The parts of files that one rank writes: their description, the copy of their bytes to memory, and their writer.

Parts are written from their tensors, window by window, or from the memory of their copies. Writes bypass the page cache
if the file system supports that; each range is hashed while it is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_fsdp_plugin.checkpoint.file_io import PAGE, OutputFile, round_up
from hf_fsdp_plugin.checkpoint.formats.manifest import MAX_RANGE, FileRange, FileRecord, hash_bytes
from hf_fsdp_plugin.checkpoint.writing.staging_buffers import StagingBuffers, piece_sizes
from hf_fsdp_plugin.devices import DEVICES, DeviceEvent, available_device
from hf_fsdp_plugin.messages import progress_bar

Content = bytes | torch.Tensor
WINDOW = 32 << 20
"""Number of bytes per write. A window of a file ends at a multiple of it, and of the ranges that are hashed."""


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
    def stop(self) -> int:
        return self.offset + sum(num_bytes(content) for content in self.contents)


@dataclass(slots=True)
class Window:
    """A contiguous byte range ``[start, stop)`` that one rank writes at once, and the items with bytes in it."""

    start: int
    stop: int
    items: list[Item]

    @property
    def origin(self) -> int:
        """File offset of the first byte of the page-aligned memory that holds the window."""
        return self.start // PAGE * PAGE

    @property
    def span(self) -> int:
        """Size in bytes of this memory."""
        return round_up(self.stop - self.origin)

    def ranges(self) -> Iterator[tuple[int, int, str]]:
        """Yield the ranges that are hashed, each with the name of its item."""
        for item in self.items:
            low, stop = max(self.start, item.offset), min(item.stop, self.stop)
            while low < stop:
                high = min(low // MAX_RANGE * MAX_RANGE + MAX_RANGE, stop)
                yield low, high, item.name
                low = high


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
    windows: tuple[Window, ...]
    shared: bool = False

    @property
    def span(self) -> int:
        """Size in bytes of the aligned memory that holds all windows."""
        return sum(window.span for window in self.windows)

    def windows_in(self, memory: torch.Tensor) -> Generator[tuple[Window, torch.Tensor]]:
        """Yield the windows with the memory that begins with their first page, in memory that holds all of them."""
        for window in self.windows:
            yield window, memory
            memory = memory[window.span :]


def whole_file(path: str, items: Iterable[Item]) -> FilePart:
    """Return the part for a file that only this rank writes, from its first to its last byte."""
    windows = _windows(items)
    return FilePart(path, windows[-1].stop if windows else 0, windows)


def shared_file(path: str, size: int, items: Iterable[Item]) -> FilePart:
    """Return the part with this rank's items of a file of ``size`` bytes."""
    return FilePart(path, size, _windows(items), shared=True)


def _windows(items: Iterable[Item]) -> tuple[Window, ...]:
    """Return the windows of adjacent items. They end at multiples of ``WINDOW``."""
    windows: list[Window] = []
    for item in sorted(items, key=lambda item: item.offset):
        start, end = item.offset, item.stop
        while start < end:
            stop = min(start // WINDOW * WINDOW + WINDOW, end)
            if windows and windows[-1].stop == start and start % WINDOW:
                windows[-1].stop = stop
                windows[-1].items.append(item)
            else:
                windows.append(Window(start, stop, [item]))
            start = stop
    return tuple(windows)


def num_bytes(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else content.numel() * content.element_size()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in row-major order, without a copy if it is contiguous."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def copy_window(window: Window, memory: torch.Tensor) -> None:
    """Copy the bytes of a window to memory that begins with its first page.

    Copies from an accelerator are asynchronous.
    """
    for item in window.items:
        offset = item.offset
        for content in item.contents:
            low, high = max(offset, window.start), min(offset + num_bytes(content), window.stop)
            if low < high:
                if isinstance(content, bytes):
                    source = torch.frombuffer(bytearray(content[low - offset : high - offset]), dtype=torch.uint8)
                else:
                    source = bytes_of(content)[low - offset : high - offset]
                into = memory[low - window.origin : high - window.origin]
                sizes = piece_sizes(into)
                for part, of_source in zip(into.split(sizes), source.split(sizes), strict=True):
                    part.copy_(of_source, non_blocking=True)
            offset += num_bytes(content)


def on_accelerator(parts: Iterable[FilePart]) -> bool:
    """Whether any tensor has to be copied from an accelerator."""
    return any(
        isinstance(content, torch.Tensor) and content.device.type != "cpu"
        for part in parts
        for window in part.windows
        for item in window.items
        for content in item.contents
    )


_Filled = tuple[Window, torch.Tensor]
"""A window, and the memory with its bytes, which begins with its first page."""


class PartWriter:
    """Writes file parts to a folder, and keeps its memory for later parts."""

    def __init__(self) -> None:
        self._buffers = StagingBuffers()

    def write(self, root: Path, parts: Sequence[FilePart]) -> list[FileRecord]:
        """Write parts directly from their tensors, through windows of memory."""
        total = sum(window.stop - window.start for part in parts for window in part.windows)
        pinned = on_accelerator(parts)
        with progress_bar("saving", total) as update:
            return [_write_part(root, part, self._filled(part, pinned=pinned), update) for part in parts]

    def write_staged(self, root: Path, parts: Sequence[FilePart], memory: torch.Tensor) -> list[FileRecord]:
        """Write the parts that were copied to ``memory``. Does not access the model's tensors."""
        records = []
        for part in parts:
            records.append(_write_part(root, part, part.windows_in(memory)))
            memory = memory[part.span :]
        return records

    def close(self) -> None:
        """Free the memory."""
        self._buffers.close()

    def _filled(self, part: FilePart, *, pinned: bool) -> Generator[_Filled]:
        """Yield windows that contain the bytes of the file. The memory is reused after the next one.

        From an accelerator, the next window is copied while the caller writes this one.
        """
        numbers = (1, 2) if pinned else (0,)
        memories = itertools.cycle([self._buffers.take(number, WINDOW, pinned=pinned) for number in numbers])
        device = available_device() if pinned else DEVICES["cpu"]
        copied: list[tuple[DeviceEvent, _Filled]] = []
        try:
            for window, memory in zip(part.windows, memories, strict=False):
                copy_window(window, memory)
                copied.append((device.record_event(), (window, memory)))
                if len(copied) > pinned:
                    event, filled = copied.pop(0)
                    event.synchronize()
                    yield filled
            for event, filled in copied:
                event.synchronize()
                yield filled
        finally:
            device.record_event().synchronize()  # the caller may have failed to write


def _write_part(
    root: Path, part: FilePart, windows: Generator[_Filled], update: Callable[[int], object] = lambda _: None
) -> FileRecord:
    """Write, hash and sync one file."""
    path, ranges = root / part.path, []
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another rank may have created a shared file already, so it is not truncated.
    with OutputFile(path) as file, closing(windows):
        file.resize(part.size)
        for window, memory in windows:
            view = memoryview(memory.numpy().data)
            for low, high, name in window.ranges():
                digest = hash_bytes(view[low - window.origin : high - window.origin])
                ranges.append(FileRange(start=low, stop=high, hash=digest, name=name))
            _write_window(file, window, view, shared=part.shared)
            update(window.stop - window.start)
        if not part.shared:  # the last write was padded to a whole page
            file.resize(part.size)
        file.sync()
    return FileRecord(path=part.path, size=part.size, ranges=tuple(ranges))


def _write_window(file: OutputFile, window: Window, view: memoryview, *, shared: bool) -> None:
    """Write the bytes of a window."""
    start, stop = window.start, window.stop
    cuts = {window.origin, round_up(stop)}
    if shared:  # other ranks may write to the first and to the last page
        cuts = {start, min(round_up(start), stop), max(stop // PAGE * PAGE, start), stop}
    for low, high in itertools.pairwise(sorted(cuts)):
        file.write(view[low - window.origin : high - window.origin], low)
