"""Reads the elements of stored tensors in row-major order, from pieces of any shape, with bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_fsdp_plugin.checkpoint.formats.boxes import Box, flat_range, flat_start, intersect, row_major, slices, span
from hf_fsdp_plugin.checkpoint.formats.element_types import dtype_size
from hf_fsdp_plugin.checkpoint.formats.stored import StoredPiece, StoredTensor
from hf_fsdp_plugin.checkpoint.io import MAX_SPAN, InputFiles

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MIN_SPLIT = 64 << 10
"""Ranges of at most this many bytes are read at once, even if most bytes are not needed."""


def read_run(files: InputFiles, tensor: StoredTensor, start: int, stop: int, out: memoryview) -> None:
    """Read the elements ``[start, stop)`` of the row-major tensor into ``out``, which has the same size in bytes."""
    size = dtype_size(tensor.dtype)
    for box in flat_range(tensor.shape, start, stop):
        part, out = out[: box.numel * size], out[box.numel * size :]
        for piece in tensor.within(box):
            common = intersect(box, piece.box)
            if common is not None:
                _read_common(files, piece, common, box, part, size)


def _read_common(files: InputFiles, piece: StoredPiece, common: Box, box: Box, out: memoryview, size: int) -> None:
    """Read ``common``, the intersection of ``box`` and ``piece``, into ``out``, which holds the bytes of ``box``."""
    ahead = zip(common.offsets, piece.box.offsets, piece.strides, strict=True)
    offset = piece.offset + size * sum((here - origin) * stride for here, origin, stride in ahead)
    within = Box(tuple(part.start for part in slices(common, box)), common.sizes)
    first = flat_start(within, box.sizes)
    if first is not None and _is_contiguous(common.sizes, piece.strides):
        files.read(piece.file, offset, out[first * size : (first + common.numel) * size])
        return
    import numpy

    target = numpy.frombuffer(out, f"u{size}").reshape(box.sizes)[slices(common, box)]
    _read_strided(files, piece.file, offset, piece.strides, target)


def _is_contiguous(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    steps = zip(sizes, strides, row_major(sizes), strict=True)
    return all(size == 1 or stride == dense for size, stride, dense in steps)


def _read_strided(files: InputFiles, file: str, offset: int, strides: Sequence[int], target: NDArray[Any]) -> None:
    """Fill ``target`` with elements that are ``strides`` apart in the file.

    The range from the first to the last element is read at once, unless it is large or most of it is not needed.
    """
    import numpy

    count = span(strides, target.shape)
    num_bytes = count * target.itemsize
    if num_bytes > MAX_SPAN or (num_bytes > _MIN_SPLIT and count > 4 * target.size):
        dim = max((d for d, size in enumerate(target.shape) if size > 1), key=lambda d: strides[d])
        low, high = numpy.array_split(target, 2, axis=dim)
        _read_strided(files, file, offset, strides, low)
        _read_strided(files, file, offset + low.shape[dim] * strides[dim] * target.itemsize, strides, high)
        return
    stored = numpy.empty(count, target.dtype)
    files.read(file, offset, stored.data.cast("B"))
    steps = [stride * target.itemsize for stride in strides]
    target[...] = numpy.lib.stride_tricks.as_strided(stored, target.shape, steps)
