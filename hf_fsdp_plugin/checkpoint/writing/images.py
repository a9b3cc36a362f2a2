"""What a file will hold, before it is written: bytes and tensors at their places in it.

An image is written either straight from the tensors, window by window, or is copied into an arena as a whole and
written from there while training goes on. Both go through :func:`fill`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from hf_fsdp_plugin.checkpoint.io import PAGE, round_up
from hf_fsdp_plugin.devices import available_device

Content = bytes | torch.Tensor


@dataclass(frozen=True, slots=True)
class Item:
    """A stretch of a file with a hash of its own.

    Attributes:
        offset: of its first byte in the file.
        contents: what follows one another there; tensors as their bytes in row-major order.
        name: of the tensor in it, for whoever finds the stretch damaged.
    """

    offset: int
    contents: tuple[Content, ...]
    name: str = ""

    @property
    def size(self) -> int:
        return sum(size_of(content) for content in self.contents)

    @property
    def stop(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True, slots=True)
class Extent:
    """An unbroken stretch of a file that one rank writes: items in order, the gaps between them zeros."""

    start: int
    stop: int
    items: tuple[Item, ...]

    @property
    def origin(self) -> int:
        """The file offset that stands at the first byte of an aligned buffer."""
        return self.start // PAGE * PAGE

    @property
    def span(self) -> int:
        """Bytes of aligned memory that hold it."""
        return round_up(self.stop - self.origin)


@dataclass(frozen=True, slots=True)
class FileImage:
    """This rank's part of one file.

    Attributes:
        path: relative to the checkpoint, with ``/``.
        size: of the whole file.
        shared: other ranks write parts of it too.
    """

    path: str
    size: int
    extents: tuple[Extent, ...]
    shared: bool = False

    @property
    def span(self) -> int:
        return sum(extent.span for extent in self.extents)


def own_file(path: str, items: Iterable[Item]) -> FileImage:
    """A file that this rank writes alone; it ends with its last item."""
    ordered = tuple(sorted(items, key=lambda item: item.offset))
    size = ordered[-1].stop if ordered else 0
    return FileImage(path, size, (Extent(0, size, ordered),) if size else ())


def shared_file(path: str, size: int, items: Iterable[Item]) -> FileImage:
    """This rank's items in a file of ``size`` bytes; neighbours become one extent."""
    runs: list[list[Item]] = []
    for item in sorted(items, key=lambda item: item.offset):
        if runs and runs[-1][-1].stop == item.offset:
            runs[-1].append(item)
        else:
            runs.append([item])
    return FileImage(path, size, tuple(Extent(run[0].offset, run[-1].stop, tuple(run)) for run in runs), shared=True)


def size_of(content: Content) -> int:
    return len(content) if isinstance(content, bytes) else content.numel() * content.element_size()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes in row-major order, without a copy where it is contiguous."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def fill(target: torch.Tensor, extent: Extent, start: int, stop: int) -> None:
    """Put the extent's bytes ``[start, stop)`` (file offsets) into ``target``; the gaps are not touched.

    Copies from an accelerator are only started.
    """
    for item in extent.items:
        if item.stop <= start or item.offset >= stop:
            continue
        for at, content in _placed(item):
            low, high = max(at, start), min(at + size_of(content), stop)
            if low >= high:
                continue
            if isinstance(content, bytes):
                source = torch.frombuffer(bytearray(content[low - at : high - at]), dtype=torch.uint8)
            else:
                source = bytes_of(content)[low - at : high - at]
            target[low - start : high - start].copy_(source, non_blocking=True)


def _placed(item: Item) -> Iterator[tuple[int, Content]]:
    at = item.offset
    for content in item.contents:
        yield at, content
        at += size_of(content)


def on_accelerator(images: Iterable[FileImage]) -> bool:
    """Whether any tensor has to be copied from an accelerator."""
    return any(
        isinstance(content, torch.Tensor) and content.device.type != "cpu"
        for image in images
        for extent in image.extents
        for item in extent.items
        for content in item.contents
    )


def wait_for_copies() -> None:
    """Until copies that :func:`fill` started are done."""
    device = available_device()
    if device.is_initialized():
        device.synchronize()
