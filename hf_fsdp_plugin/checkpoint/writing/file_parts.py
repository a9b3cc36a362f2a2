"""The parts of files that one rank writes: their description, the memory in which they are assembled, and the writer.

A part is either written directly from the tensors, window by window, or copied as a whole to a staging buffer and
written from the buffer during training (``copies.py``). Both use :func:`copy_window`. Writes bypass the page cache if
the file system supports that; each range is hashed while it is written.

Page faults in new memory take ten times as long as the copy from the model. Therefore later saves use the same buffers.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_fsdp_plugin.checkpoint.formats.manifest import MAX_RANGE, FileRange, FileRecord
from hf_fsdp_plugin.checkpoint.io import PAGE, OutputFile, hash_bytes, round_up
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


_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23  # Linux 2.6.38 and 5.14; if madvise fails, pages are zeroed instead
_STEP = 64 << 20
_PINNED = "_hf_fsdp_pinned"
"""Attribute of memory that :func:`_pin` has pinned."""
PIECE = 256 << 20
"""Bytes that are pinned at a time. Kernels of the rank cannot be launched meanwhile.

A copy from or to an accelerator must not cross from one piece to the next: CUDA refuses a range of two registrations.
"""


def allocate_aligned(size: int, *, pinned: bool = False) -> torch.Tensor:
    """Allocate ``size`` bytes of page-aligned memory as a uint8 tensor, pinned for copies from an accelerator."""
    # Shared memory, although its pages are small: after a fork, a write to private memory would move it to other pages,
    # while the accelerator still copies to the pinned ones.
    memory = mmap.mmap(-1, round_up(max(size, 1)))
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    _advise(tensor.data_ptr(), tensor.numel(), _MADV_HUGEPAGE)
    if pinned:
        # Prefaulted first, because the driver holds a lock of all its calls while it pins, and would allocate the pages
        # under it. torch's pool of pinned memory is not used, because it rounds sizes up to powers of two.
        allocate_pages(tensor)
        if not _pin(tensor) and (allocated := _allocate_pinned(tensor.numel())) is not None:
            return allocated
    return tensor


def _allocate_pinned(size: int) -> torch.Tensor | None:
    """Allocate page-aligned memory in torch's pool, for devices that cannot pin other memory; ``None`` if it fails."""
    try:
        memory = torch.empty(size + PAGE, dtype=torch.uint8, pin_memory=True, device="cpu")
    except RuntimeError:  # the system limits locked memory
        return None
    start = -memory.data_ptr() % PAGE
    return memory[start : start + size]


def _pin(memory: torch.Tensor) -> bool:
    """Pin memory piece by piece. Returns whether all of it is pinned, or else none of it is."""
    pinned: list[torch.Tensor] = []
    for piece in memory.split(PIECE):
        if not available_device().pin(piece):
            for before in pinned:
                available_device().unpin(before)
            return False
        pinned.append(piece)
    setattr(memory, _PINNED, True)
    return True


def unpin(memory: torch.Tensor) -> None:
    """Unpin memory of :func:`allocate_aligned`, before the last reference to it is deleted and it is unmapped."""
    for piece in memory.split(PIECE) if getattr(memory, _PINNED, False) else ():  # not that of torch's pool
        available_device().unpin(piece)


def piece_sizes(into: torch.Tensor) -> list[int]:
    """Return the sizes of the parts of a slice of memory of :func:`allocate_aligned` that each are in one piece."""
    first = min(PIECE - int(into.storage_offset()) % PIECE, into.numel())
    rest = into.numel() - first
    return [first, *[PIECE] * (rest // PIECE), *([rest % PIECE] if rest % PIECE else [])]


def allocate_pages(memory: torch.Tensor) -> None:
    """Allocate all pages of ``memory``, in steps of 64 MiB so that waiting threads can run between them."""
    for start in range(0, memory.numel(), _STEP):
        part = memory[start : start + _STEP]
        if not _advise(part.data_ptr(), part.numel(), _MADV_POPULATE_WRITE):
            part[::PAGE].zero_()


def _advise(address: int, size: int, advice: int) -> bool:
    madvise = ctypes.CDLL(None).madvise  # ctypes releases the GIL during the call; mmap.madvise does not
    return madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_int(advice)) == 0


def lower_thread_priority() -> None:
    """Give the calling thread (on Linux, only this thread) the lowest priority, so that it uses only idle cores."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


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
            records.append(_write_part(root, part, _staged(part, memory)))
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


def _staged(part: FilePart, memory: torch.Tensor) -> Generator[_Filled]:
    for window in part.windows:
        yield window, memory
        memory = memory[window.span :]


def _write_part(
    root: Path, part: FilePart, windows: Generator[_Filled], update: Callable[[int], object] = lambda _: None
) -> FileRecord:
    """Write, hash and sync one file."""
    path, ranges = root / part.path, []
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another rank may have created a shared file already, so it is not truncated.
    with closing(OutputFile(path)) as file, closing(windows):
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


class StagingBuffers:
    """Numbered buffers that are used again, such as for the copies of this rank's shards while training continues."""

    def __init__(self) -> None:
        self._memory: dict[int, torch.Tensor] = {}

    def take(self, number: int, size: int, *, pinned: bool) -> torch.Tensor:
        """Return at least ``size`` bytes of memory: buffer ``number``, or a larger one in its place."""
        if number not in self._memory or self._memory[number].numel() < size:
            if number in self._memory:
                unpin(self._memory.pop(number))
            self._memory[number] = allocate_aligned(size, pinned=pinned)
        return self._memory[number]

    def missing(self, sizes: Mapping[int, int]) -> int:
        """Return the bytes that :meth:`take` would allocate for buffers of these sizes by number."""
        held = {number: memory.numel() for number, memory in self._memory.items()}
        return sum(max(0, round_up(size) - held.get(number, 0)) for number, size in sizes.items())

    def close(self) -> None:
        """Free all buffers."""
        for memory in self._memory.values():
            unpin(memory)
        self._memory.clear()
