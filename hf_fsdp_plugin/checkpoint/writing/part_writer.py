"""Writes parts of files: from their tensors, window by window, or from the memory of their copies.

Writes bypass the page cache if the file system supports that; each range is hashed while it is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path

import torch

from hf_fsdp_plugin.checkpoint.file_io import PAGE, OutputFile, round_up
from hf_fsdp_plugin.checkpoint.formats.manifest import FileRange, FileRecord, hash_bytes
from hf_fsdp_plugin.checkpoint.writing.file_parts import WINDOW, FilePart, Window, copy_window, on_accelerator
from hf_fsdp_plugin.checkpoint.writing.staging_buffers import StagingBuffers
from hf_fsdp_plugin.devices import DEVICES, DeviceEvent, available_device
from hf_fsdp_plugin.messages import progress_bar

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
