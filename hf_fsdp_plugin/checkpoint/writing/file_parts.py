"""Describes the part of a file that one rank writes, before anything is written: bytes and tensors with their offsets.

A part is either written directly from the tensors, window by window, or copied as a whole to a staging buffer and
written from the buffer during training. Both use :func:`fill`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from hf_fsdp_plugin.checkpoint.io import PAGE, round_up
from hf_fsdp_plugin.checkpoint.writing.buffers import piecewise
from hf_fsdp_plugin.devices import available_device

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
    """A contiguous byte range ``[start, stop)`` that one rank writes: ordered items with zeros between them."""

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

    def first_item(self, offset: int) -> int:
        """Return the index of the first item that ends after a file offset."""
        return bisect.bisect_right(self.items, offset, key=lambda item: item.stop)


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
    """Return the part for a file that only this rank writes. The file ends with its last item."""
    ordered = tuple(sorted(items, key=lambda item: item.offset))
    size = ordered[-1].stop if ordered else 0
    return FilePart(path, size, (Extent(0, size, ordered),) if size else ())


def shared_file(path: str, size: int, items: Iterable[Item]) -> FilePart:
    """Return the part with this rank's items of a file of ``size`` bytes. Adjacent items become one extent."""
    runs: list[list[Item]] = []
    for item in sorted(items, key=lambda item: item.offset):
        if runs and runs[-1][-1].stop == item.offset:
            runs[-1].append(item)
        else:
            runs.append([item])
    return FilePart(path, size, tuple(Extent(run[0].offset, run[-1].stop, tuple(run)) for run in runs), shared=True)


def num_bytes(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else content.numel() * content.element_size()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in row-major order, without a copy if it is contiguous."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def fill(target: torch.Tensor, extent: Extent, start: int, stop: int) -> None:
    """Copy the extent's bytes ``[start, stop)`` (file offsets) to ``target``, except the gaps between items.

    Copies from an accelerator are asynchronous: call :func:`wait_for_copies`, or what :func:`record_copies` returns,
    before the bytes are used.
    """
    for item in itertools.islice(extent.items, extent.first_item(start), None):
        if item.offset >= stop:
            break
        for offset, content in _with_offsets(item):
            low, high = max(offset, start), min(offset + num_bytes(content), stop)
            if low >= high:
                continue
            if isinstance(content, bytes):
                source = torch.frombuffer(bytearray(content[low - offset : high - offset]), dtype=torch.uint8)
            else:
                source = bytes_of(content)[low - offset : high - offset]
            into = target[low - start : high - start]
            sizes = piecewise(into)
            for part, of_source in zip(into.split(sizes), source.split(sizes), strict=True):
                part.copy_(of_source, non_blocking=True)


def _with_offsets(item: Item) -> Iterator[tuple[int, Content]]:
    offset = item.offset
    for content in item.contents:
        yield offset, content
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
    """Wait for the copies that :func:`fill` started, and not for other streams of the device."""
    if available_device().is_initialized():
        record_copies()()


def record_copies() -> Callable[[], None]:
    """Return a function that waits for the copies that :func:`fill` has started so far, but not for later ones.

    Any thread may call it.
    """
    device = available_device()
    index, wait = device.current_index(), device.record_event()

    def wait_in_any_thread() -> None:
        device.set_current(index)  # a new thread starts on device 0, where the wait would create a context
        wait()

    return wait_in_any_thread
