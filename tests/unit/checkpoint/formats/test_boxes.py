"""Operations on boxes agree with numpy's slicing."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from hf_fsdp_plugin.checkpoint.formats.boxes import (
    Box,
    flat_range,
    intersect,
    is_within,
    relative_slices,
    row_major,
    whole_box,
)
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredPiece, StoredTensor


def some_shape(draw: random.Random) -> tuple[int, ...]:
    return tuple(draw.randint(1, 4) for _ in range(draw.randint(0, 4)))


def some_box(draw: random.Random, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw.randrange(size) for size in shape)
    return Box(offsets, tuple(draw.randint(1, size - o) for size, o in zip(shape, offsets, strict=True)))


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    """Return the numbers of the elements of ``box``, in row-major order."""
    return np.arange(math.prod(shape)).reshape(shape)[relative_slices(box, whole_box(shape))].ravel().tolist()


@pytest.mark.parametrize("seed", range(40))
def test_flat_range_is_contiguous_boxes_in_order(seed: int) -> None:
    draw = random.Random(seed)
    shape = some_shape(draw)
    start = draw.randint(0, math.prod(shape))
    stop = draw.randint(start, math.prod(shape))
    boxes = flat_range(shape, start, stop)
    held = [elements(shape, box) for box in boxes]
    assert [number for part in held for number in part] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def num_uncovered(shape: tuple[int, ...], boxes: list[Box]) -> int:
    pieces = tuple(StoredPiece(box, "model.bin", 0, row_major(box.sizes)) for box in boxes)
    return StoredTensor("weight", "float32", shape, pieces).uncovered()


def test_uncovered_elements_are_counted() -> None:
    assert num_uncovered((4, 2), [Box((0, 0), (2, 2)), Box((3, 0), (1, 1))]) == 3


@pytest.mark.parametrize("seed", range(40))
def test_intersection_contains_the_common_elements(seed: int) -> None:
    draw = random.Random(seed)
    shape = some_shape(draw)
    a, b = some_box(draw, shape), some_box(draw, shape)
    common = intersect(a, b)
    held = [set(elements(shape, box)) if box is not None else set() for box in (a, b, common)]
    assert held[0] & held[1] == held[2]


def test_box_beyond_the_tensor_is_not_within() -> None:
    assert not is_within(Box((3, 0), (5, 2)), (4, 2))
    assert is_within(Box((3, 0), (1, 2)), (4, 2))
    assert not is_within(Box((0,), (1,)), (4, 2))


def test_boxes_of_scalars_and_empty_tensors() -> None:
    assert flat_range((), 0, 1) == [Box((), ())]
    assert intersect(Box((), ()), Box((), ())) == Box((), ())
    assert (Box((), ()).numel, num_uncovered((), []), num_uncovered((), [Box((), ())])) == (1, 1, 0)
    assert (num_uncovered((0, 3), []), flat_range((0, 3), 0, 0)) == (0, [])
    assert row_major((2, 3, 4)) == (12, 4, 1)
    assert row_major(()) == ()
