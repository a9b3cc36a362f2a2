"""The elements of a stored tensor in row-major order, whatever pieces they lie in, with bounded memory."""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_fsdp_plugin.checkpoint.disk import DIRECT, PAGE, REFUSED
from hf_fsdp_plugin.checkpoint.formats.boxes import Box, flat_range, flat_start, intersect, row_major, slices
from hf_fsdp_plugin.checkpoint.formats.element_types import dtype_size
from hf_fsdp_plugin.checkpoint.formats.stored import StoredPiece, StoredTensor, refuse

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_SPAN = 16 << 20
"""Bytes of a file that are read at once where the wanted elements do not lie side by side."""
_WORTH_SPLITTING = 64 << 10
_MAX_OPEN = 64
_LARGE = 1 << 20
"""Bytes from which on a read may pass the page cache: smaller ones gain from what the cache reads ahead."""
_ONLY_CACHED = getattr(os, "RWF_NOWAIT", 0)


class InputFiles:
    """The files below ``root``, opened when first read; a few stay open, however many ranks wrote the checkpoint."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: OrderedDict[str, _InputFile] = OrderedDict()
        self._block = memoryview(mmap.mmap(-1, MAX_SPAN))  # costs nothing until it is used

    def __enter__(self) -> InputFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def read(self, file: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` from byte ``offset`` on. Raises ``CheckpointError`` where the file ends before."""
        opened, position = self._opened(file), offset
        while out:
            count = opened.read(position, out)
            if count == 0:
                message = f"ends at byte {position:,}; {position + len(out):,} bytes were expected."
                refuse(self._root / file, message, "It was cut short: fetch it again, or take another checkpoint.")
            out, position = out[count:], position + count

    def _opened(self, file: str) -> _InputFile:
        if file in self._open:
            self._open.move_to_end(file)
        else:
            if len(self._open) == _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            self._open[file] = _InputFile(self._root / file, self._block)
        return self._open[file]


class _InputFile:
    """An open file. What the page cache does not hold is read past it, if it is much.

    Pages that the cache has to find for bytes that are needed once cost more than the disk does.
    """

    def __init__(self, path: Path, block: memoryview) -> None:
        self._path, self._block = path, block
        self._plain = os.open(path, os.O_RDONLY)
        self._direct: int | None = None if DIRECT and _ONLY_CACHED else -1

    def close(self) -> None:
        os.close(self._plain)
        self._close_direct()

    def read(self, offset: int, out: memoryview) -> int:
        """Read some bytes into ``out``, and return their number: 0 at the end of the file only."""
        if len(out) < _LARGE or self._direct == -1:
            return os.preadv(self._plain, [out], offset)
        for attempt in (self._read_cached, self._read_directly):
            try:
                count = attempt(offset, out)
            except BlockingIOError:  # the next page is not in the cache
                continue
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
                self._close_direct()
                break
            if count:
                return count
        return os.preadv(self._plain, [out], offset)

    def _read_cached(self, offset: int, out: memoryview) -> int:
        return os.preadv(self._plain, [out], offset, _ONLY_CACHED)

    def _close_direct(self) -> None:
        """Read through the cache from now on: the file system takes no direct reads."""
        if self._direct is not None and self._direct >= 0:
            os.close(self._direct)
        self._direct = -1

    def _read_directly(self, offset: int, out: memoryview) -> int:
        """Whole pages to aligned memory, and from there what is wanted of them."""
        if self._direct is None:
            self._direct = os.open(self._path, os.O_RDONLY | DIRECT)
        skipped = offset % PAGE
        wanted = -(-(skipped + len(out)) // PAGE) * PAGE
        count = os.preadv(self._direct, [self._block[:wanted]], offset - skipped) - skipped
        count = min(max(count, 0), len(out))
        out[:count] = self._block[skipped : skipped + count]
        return count


def read_run(files: InputFiles, tensor: StoredTensor, start: int, stop: int, out: memoryview) -> None:
    """The elements ``[start, stop)`` of the row-major tensor into ``out``, which has just their bytes."""
    size = dtype_size(tensor.dtype)
    for box in flat_range(tensor.shape, start, stop):
        part, out = out[: box.numel * size], out[box.numel * size :]
        for piece in tensor.pieces:
            common = intersect(box, piece.box)
            if common is not None:
                _read_common(files, piece, common, box, part, size)


def _read_common(files: InputFiles, piece: StoredPiece, common: Box, box: Box, out: memoryview, size: int) -> None:
    """What ``piece`` holds of ``box`` to its place in ``out``, the bytes of ``box``."""
    ahead = zip(common.offsets, piece.box.offsets, piece.strides, strict=True)
    offset = piece.offset + size * sum((here - origin) * stride for here, origin, stride in ahead)
    within = Box(tuple(part.start for part in slices(common, box)), common.sizes)
    first = flat_start(within, box.sizes)
    if first is not None and _side_by_side(common.sizes, piece.strides):
        files.read(piece.file, offset, out[first * size : (first + common.numel) * size])
        return
    import numpy

    target = numpy.frombuffer(out, f"u{size}").reshape(box.sizes)[slices(common, box)]
    _read_strided(files, piece.file, offset, piece.strides, target)


def _side_by_side(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    steps = zip(sizes, strides, row_major(sizes), strict=True)
    return all(size == 1 or stride == dense for size, stride, dense in steps)


def _read_strided(files: InputFiles, file: str, offset: int, strides: Sequence[int], target: NDArray[Any]) -> None:
    """Fill ``target`` with elements that lie ``strides`` apart in the file.

    The span from the first to the last is read at once, unless it is large, or mostly holds what is not wanted.
    """
    import numpy

    span = 1 + sum((size - 1) * stride for size, stride in zip(target.shape, strides, strict=True))
    num_bytes = span * target.itemsize
    if num_bytes > MAX_SPAN or (num_bytes > _WORTH_SPLITTING and span > 4 * target.size):
        dim = max((d for d, size in enumerate(target.shape) if size > 1), key=lambda d: strides[d])
        low, high = numpy.array_split(target, 2, axis=dim)
        _read_strided(files, file, offset, strides, low)
        _read_strided(files, file, offset + low.shape[dim] * strides[dim] * target.itemsize, strides, high)
        return
    stored = numpy.empty(span, target.dtype)
    files.read(file, offset, stored.data.cast("B"))
    steps = [stride * target.itemsize for stride in strides]
    target[...] = numpy.lib.stride_tricks.as_strided(stored, target.shape, steps)
