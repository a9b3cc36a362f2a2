"""Finds the boxes of the global tensor that a rank's pickled DTensor or ShardedTensor contains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hf_fsdp_plugin.checkpoint.formats.boxes import Box, within
from hf_fsdp_plugin.checkpoint.formats.pickles import Distributed, PickledTensor, Replicate, Shard, StridedShard
from hf_fsdp_plugin.torch_private.modules import LOCAL_TENSOR_ATTRIBUTE


def parts_of(value: Distributed) -> tuple[tuple[int, ...], list[tuple[Box, PickledTensor]]]:
    """Return the global shape, and this rank's non-empty boxes with their tensors.

    Raises:
        ValueError: the placement is not supported, or sizes contradict each other.
        AttributeError, KeyError, TypeError: the pickle is not in the form that torch 2.13 writes.
    """
    return _of_dtensor(value.state) if value.kind == "DTensor" else _of_sharded_tensor(value.state)


def _of_dtensor(state: Any) -> tuple[tuple[int, ...], list[tuple[Box, PickledTensor]]]:
    attributes = state[1] if isinstance(state, tuple) else state
    local, spec = attributes[LOCAL_TENSOR_ATTRIBUTE], attributes["_spec"]
    shape = tuple(spec.tensor_meta.shape)
    begins, ends = [0] * len(shape), list(shape)
    sizes = [math.prod(_flat(axis.shape)) for axis in spec.mesh._layout.axes]
    for size, coordinate, placement in zip(sizes, spec.mesh._coordinate_on_dim, spec.placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard) or isinstance(placement, StridedShard):
            raise ValueError(f"placement {type(placement).__name__} is not supported")
        dim = placement.dim
        length = ends[dim] - begins[dim]
        # Like torch.chunk: the chunks are equal, except that the last ones may be smaller or empty.
        chunk = -(-length // size)
        start = min(chunk * coordinate, length)
        begins[dim], ends[dim] = begins[dim] + start, begins[dim] + min(start + chunk, length)
    box = Box(tuple(begins), tuple(end - begin for begin, end in zip(begins, ends, strict=True)))
    return shape, _non_empty(shape, [(box, local)])


def _flat(shape: Any) -> Sequence[int]:
    return [n for part in shape for n in _flat(part)] if isinstance(shape, tuple) else [shape]


def _of_sharded_tensor(state: Any) -> tuple[tuple[int, ...], list[tuple[Box, PickledTensor]]]:
    shards, metadata = state[0], state[1]
    boxes = [(Box(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)), s.tensor) for s in shards]
    shape = tuple(metadata.size)
    return shape, _non_empty(shape, boxes)


def _non_empty(shape: tuple[int, ...], parts: list[tuple[Box, PickledTensor]]) -> list[tuple[Box, PickledTensor]]:
    """Return the parts that are not empty. Raises ``ValueError`` for a tensor that does not match its box."""
    for box, tensor in parts:
        if not isinstance(tensor, PickledTensor) or tensor.shape != box.sizes or not within(box, shape):
            raise ValueError(f"a part of shape {getattr(tensor, 'shape', None)} does not match {box} of {shape}")
    return [(box, tensor) for box, tensor in parts if box.numel]
