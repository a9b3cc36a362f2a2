"""The parts of files that one rank writes: their description, and the copy of their bytes to memory."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

import torch

from hf_fsdp_plugin.checkpoint.file_io import PAGE, round_up
from hf_fsdp_plugin.checkpoint.formats.manifest import MAX_RANGE
from hf_fsdp_plugin.checkpoint.writing.staging_buffers import piece_sizes

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
