"""Boxes of a tensor, which describe the parts in a rank's memory and in a file.

All numbers of boxes are elements. A *run* is a contiguous range of a tensor's elements in row-major order, as FSDP1
shards flat parameters and as files store tensors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A hyper-rectangle of a tensor.

    Attributes:
        offsets: the first element in each dim of the tensor.
        sizes: the number of elements in each dim; as many dims as the tensor has.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; a box without dims has one."""
        return math.prod(self.sizes)


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that covers a tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def is_row_major(strides: Iterable[int], shape: Sequence[int]) -> bool:
    """Whether elements with these strides are contiguous in row-major order. In a dim of size 1, any stride is."""
    steps = zip(shape, strides, row_major(shape), strict=True)
    return all(size == 1 or stride == dense for size, stride, dense in steps)


def element_span(strides: Iterable[int], shape: Iterable[int]) -> int:
    """Return the number of elements of a file from the first to the last element of a box with these strides."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def strided_parts(strides: Sequence[int], shape: Sequence[int], limit: int) -> Iterator[Box]:
    """Yield the parts of a box of this shape that are each read at once.

    Args:
        strides: distance between neighbours in each dim, in elements of the file.
        limit: maximum number of elements of the file from the first to the last element of a part.
    """
    left = [whole_box(shape)]
    while left:
        box = left.pop()
        if element_span(strides, box.sizes) <= limit:
            yield box
            continue
        dim = max((dim for dim, size in enumerate(box.sizes) if size > 1), key=lambda dim: strides[dim])
        half = box.sizes[dim] // 2
        for first, size in ((half, box.sizes[dim] - half), (0, half)):
            offsets, sizes = [*box.offsets], [*box.sizes]
            offsets[dim], sizes[dim] = offsets[dim] + first, size
            left.append(Box(tuple(offsets), tuple(sizes)))


def flat_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the run ``[start, stop)`` of a tensor as boxes, in order; each box is itself a run.

    There are at most ``2 * len(shape) - 1`` boxes: the end of a row, whole rows and the start of a row, and recursively
    the same within a row that is split.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, skipped = divmod(start, row)
    last, left = divmod(stop, row)
    if first == last:
        return _in_row(first, flat_range(shape[1:], skipped, left))
    head = _in_row(first, flat_range(shape[1:], skipped, row)) if skipped else []
    tail = _in_row(last, flat_range(shape[1:], 0, left)) if left else []
    begin = first + bool(skipped)
    rows = [Box((begin, *(0 for _ in shape[1:])), (last - begin, *shape[1:]))] if begin < last else []
    return [*head, *rows, *tail]


def _in_row(row: int, boxes: Iterable[Box]) -> list[Box]:
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes]


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or ``None`` if it is empty."""
    offsets, sizes = [], []
    for x, n, y, m in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        low, high = max(x, y), min(x + n, y + m)
        if low >= high:  # most pairs of a tensor's boxes are apart in the first dim
            return None
        offsets.append(low)
        sizes.append(high - low)
    return Box(tuple(offsets), tuple(sizes))


def is_within(box: Box, shape: Sequence[int]) -> bool:
    """Whether the box is inside a tensor of this shape."""
    if not len(box.offsets) == len(box.sizes) == len(shape):
        return False
    return all(map(operator.le, map(operator.add, box.offsets, box.sizes), shape))


def relative_slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that select ``inner`` from an array that contains ``outer``."""
    places = zip(inner.offsets, inner.sizes, outer.offsets, strict=True)
    return tuple(slice(offset - origin, offset - origin + size) for offset, size, origin in places)
