"""The formats of ``torch.save``: ``bin``, a state dict in one file, and ``per_rank``, a file per rank with its parts.

Accelerate writes the second with ``use_dcp=False``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint.errors import COPY_ALL_RANKS, problem, raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.formats import stored_tensors
from hf_fsdp_plugin.checkpoint.formats.archives import TorchZip
from hf_fsdp_plugin.checkpoint.formats.boxes import Box, is_within, whole_box
from hf_fsdp_plugin.checkpoint.formats.pickles import Distributed, PickledTensor, Replicate, Shard, StridedShard
from hf_fsdp_plugin.checkpoint.formats.safetensors import read_weight_map
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredPiece, StoredState, StoredTensor
from hf_fsdp_plugin.checkpoint.io import open_regular
from hf_fsdp_plugin.checkpoint.names import FSDP_MODEL, HF_MODEL_BIN, index_file, numbered_from_one, numbered_name
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.torch_private.modules import LOCAL_TENSOR_ATTRIBUTE

_Parts = tuple[tuple[int, ...], list[tuple[Box, PickledTensor]]]
"""The global shape of a tensor, and the boxes of one rank with their tensors."""


def parts_of(value: Distributed) -> _Parts:
    """Return the global shape, and this rank's non-empty boxes with their tensors.

    Raises:
        ValueError: the placement is not supported, or sizes contradict each other.
        AttributeError, KeyError, TypeError: the pickle is not in the form that torch 2.13 writes.
    """
    if value.kind == "DTensor":
        shape, parts = _of_dtensor(value.state)
    else:  # a ShardedTensor
        shards, metadata = value.state[:2]
        shape = tuple(metadata.size)
        parts = [(Box(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)), s.tensor) for s in shards]
    for box, tensor in parts:
        if not isinstance(tensor, PickledTensor) or tensor.shape != box.sizes or not is_within(box, shape):
            raise ValueError(f"a part of shape {getattr(tensor, 'shape', None)} does not match {box} of {shape}")
    return shape, [(box, tensor) for box, tensor in parts if box.numel]


def _of_dtensor(state: Any) -> _Parts:
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
    return shape, [(box, local)]


def _flat(shape: Any) -> Sequence[int]:
    return [n for part in shape for n in _flat(part)] if isinstance(shape, tuple) else [shape]


FLAT_PARAMETER = "flat_param"
"""Suffix of the names in a local state dict of FSDP1."""


_FLAT = "is a LOCAL_STATE_DICT of stock FSDP1, which lacks the names and shapes of the original parameters."
_FLAT_FIX = (
    "Load it with the script and the number of ranks that wrote it, and save it with fsdp_state_dict_type: "
    "SHARDED_STATE_DICT."
)


_File = tuple[str, TorchZip]
"""A file of the checkpoint: its name and its archive."""


def read_state_dict(root: Path, names: list[str]) -> dict[tuple[Any, ...], Any]:
    """Merge the state dicts of all files into one, with a :class:`StoredTensor` for each tensor."""
    with ExitStack() as stack:
        found: list[tuple[_File, Any]] = []
        for name in names:
            path = root / name
            descriptor = open_regular(path)
            stack.callback(os.close, descriptor)
            zipped = TorchZip(descriptor, 0, os.fstat(descriptor).st_size, path)
            value = zipped.value()
            if not isinstance(value, dict):
                refuse("FSDP-E460", path, f"contains a {type(value).__name__} instead of a state dict.")
            if any(str(key).endswith(FLAT_PARAMETER) for key in value):
                refuse("FSDP-E460", path, _FLAT, _FLAT_FIX)
            found.append(((name, zipped), value))
        try:
            return {(key,): value for key, value in _merge("", found).items()}
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, ArithmeticError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            message = f"is not a state dict in the form that torch 2.13 writes ({type(error).__name__}: {error})."
            fix = "Save it again with fsdp_state_dict_type: SHARDED_STATE_DICT and use_dcp=True."
            refuse("FSDP-E460", root / names[0], message, fix)


def _merge(name: str, found: list[tuple[_File, Any]]) -> Any:
    """Merge the values of one name from several files. A value that is not a tensor is taken from the first file."""
    file, first = found[0]
    if isinstance(first, dict):
        keys = {key: None for _, value in found for key in value}
        return {key: _merge(str(key), [(f, value[key]) for f, value in found if key in value]) for key in keys}
    if isinstance(first, list):
        return [_merge(name, [(file, item)]) for item in first]
    if not isinstance(first, (PickledTensor, Distributed)):
        return first
    shape, dtype = None, None
    pieces = []
    for (relative, zipped), value in found:
        is_whole = isinstance(value, PickledTensor)
        global_shape, parts = (value.shape, [(whole_box(value.shape), value)]) if is_whole else parts_of(value)
        if shape not in (None, global_shape):
            raise ValueError(f"{name!r} has the shape {global_shape} in {relative} and {shape} in another file")
        shape = global_shape
        for box, tensor in parts:
            dtype = dtype or tensor.dtype
            pieces.append(StoredPiece(box, relative, zipped.tensor_offset(tensor), tensor.strides))
    return StoredTensor(name, dtype or "float32", shape or (), stored_tensors.without_replicas(pieces))


def read_bin(root: Path, stem: str, number: int) -> StoredState | None:
    """Return the state in Accelerate's file, or in the file or shards of a Hugging Face folder."""
    for each in (FSDP_MODEL, HF_MODEL_BIN) if stem == FSDP_MODEL else (stem,):
        name = f"{numbered_from_one(each, number)}.bin"
        index = root / index_file(name)
        if (root / name).is_file():
            return StoredState(read_state_dict(root, [name]), (name,), root / name)
        if index.is_file():
            names = list(read_weight_map(root, index))
            return StoredState(read_state_dict(root, names), (index.name, *names), index)
    return None


def read_per_rank(root: Path, stem: str, number: int) -> StoredState | None:
    """Return the state in ``{stem}_rank{R}.bin`` of all ranks, or ``None`` if there are no such files."""
    for each in dict.fromkeys((numbered_name(stem, number), numbered_from_one(stem, number))):
        if names := _rank_files(root, each):
            fix = f"Only {', '.join(names)} are in the folder. {COPY_ALL_RANKS}"
            return StoredState(read_state_dict(root, names), tuple(names), root / f"{each}_rank*.bin", fix)
    return None


def _rank_files(root: Path, stem: str) -> list[str]:
    """Return the files in rank order. Raises ``CheckpointError`` if a file below the highest rank is missing."""
    pattern = re.compile(rf"{re.escape(stem)}_rank(\d{{1,7}})\.bin")
    ranks = {int(match[1]) for path in root.iterdir() if (match := pattern.fullmatch(path.name))}
    missing = [root / f"{stem}_rank{rank}.bin" for rank in range(max(ranks, default=0)) if rank not in ranks]
    message = "is missing, although files of higher ranks exist."
    problems = [problem("FSDP-E457", path, message, COPY_ALL_RANKS) for path in missing]
    raise_if_any(problems[: stored_tensors.MAX_PROBLEMS])
    return [f"{stem}_rank{rank}.bin" for rank in sorted(ranks)]
