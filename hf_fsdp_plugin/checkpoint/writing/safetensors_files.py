"""Weights as safetensors: one model file for all ranks to write into, and each rank's own file for ``local``.

A safetensors file is a header and the tensors' bytes in row-major order, so where each shard belongs is known before
anything is written: every rank fills its own stretches, and nobody gathers anything.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_fsdp_plugin.checkpoint.formats.boxes import Box, row_major
from hf_fsdp_plugin.checkpoint.formats.safetensors_layout import SafetensorsFile, index_text, plan_files
from hf_fsdp_plugin.checkpoint.names import HF_MODEL
from hf_fsdp_plugin.checkpoint.shards import Held, OptimizerShards, owned
from hf_fsdp_plugin.checkpoint.writing.dcp import dtype_name
from hf_fsdp_plugin.checkpoint.writing.images import FileImage, Item, own_file, shared_file

MAX_SHARD_SIZE = 50 * 10**9
"""Bytes of one safetensors file; what Transformers 5 takes."""
_ONE_FILE = 2**63


def full_files(
    tensors: Sequence[Held], rank: int, *, stem: str = HF_MODEL, max_shard_size: int = MAX_SHARD_SIZE
) -> tuple[list[FileImage], str | None]:
    """This rank's parts of the Hugging Face files for whole ``tensors``, and the text of their index, if they need one.

    Every rank gives the same tensors in the same order. Rank 0 adds the headers.
    """
    files = plan_files([(held.name, dtype_name(held.dtype), held.shape) for held in tensors], max_shard_size, stem)
    mine = owned(tensors)
    images = []
    for file in files:
        items = [Item(0, (file.header,))] if rank == 0 else []
        for held in mine:
            if held.name in file.offsets:
                items += _runs(held, file.offsets[held.name])
        images.append(shared_file(file.name, file.size, items))
    return images, index_text(files)


def _runs(held: Held, begin: int) -> Iterator[Item]:
    """The held boxes as runs of the whole tensor's bytes, which begin at ``begin``."""
    strides = row_major(held.shape)
    for piece in held.pieces:
        axis = _first_whole_axis(piece.box, held.shape)
        for index in itertools.product(*(range(size) for size in piece.box.sizes[:axis])):
            place = [*piece.box.offsets]
            for number, at in enumerate(index):
                place[number] += at
            element = sum(at * stride for at, stride in zip(place, strides, strict=True))
            yield Item(begin + element * held.dtype.itemsize, (piece.tensor[index],), name=held.name)


def _first_whole_axis(box: Box, shape: tuple[int, ...]) -> int:
    """The box is one run from this axis on, for each index of the axes before it."""
    axis = len(shape)
    while axis > 0 and box.sizes[axis - 1] == shape[axis - 1]:
        axis -= 1
    return max(axis - 1, 0)


def local_model_file(
    path: str, tensors: Iterable[Held], aliases: Mapping[str, str], rank: int, world_size: int
) -> FileImage:
    """Everything this rank holds of the model, each piece with its place in the whole."""
    entries = {
        f"{held.name}@{','.join(map(str, piece.box.offsets))}": (held, piece.box, piece.tensor, {"name": held.name})
        for held in tensors
        for piece in held.pieces
    }
    return _local_file(path, entries, {"rank": rank, "world_size": world_size, "aliases": dict(aliases)})


def local_optimizer_file(path: str, shards: OptimizerShards, rank: int, world_size: int) -> FileImage:
    """Everything this rank holds of the optimizer; plain values and groups go into the header."""
    entries: dict[str, Any] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, state in shards.state.items():
        for key, value in state.items():
            if not isinstance(value, Held):
                values.setdefault(name, {})[key] = value
                continue
            for piece in value.pieces:
                place = {"name": name, "key": key}
                entry = f"{name}.{key}@{','.join(map(str, piece.box.offsets))}"
                entries[entry] = (value, piece.box, piece.tensor, place)
    facts = {"rank": rank, "world_size": world_size, "values": values, "groups": list(shards.groups)}
    return _local_file(path, entries, facts)


def _local_file(path: str, entries: Mapping[str, Any], facts: dict[str, Any]) -> FileImage:
    facts["pieces"] = {
        entry: {**place, "shape": held.shape, "offsets": box.offsets}
        for entry, (held, box, _, place) in entries.items()
    }
    tensors = [(entry, dtype_name(held.dtype), box.sizes) for entry, (held, box, _, _) in entries.items()]
    metadata = {"fsdp_local": json.dumps(facts, default=_plain)}
    (file,) = plan_files(tensors, _ONE_FILE, metadata=metadata)
    return own_file(path, _whole_items(file, entries))


def _whole_items(file: SafetensorsFile, entries: Mapping[str, Any]) -> Iterator[Item]:
    yield Item(0, (file.header,))
    for entry, offset in file.offsets.items():
        held, _, tensor, _ = entries[entry]
        yield Item(offset, (tensor,), name=held.name)


def _plain(value: Any) -> Any:
    """Hyperparameters may be scalar tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    raise TypeError(f"a local checkpoint cannot hold {type(value).__name__} objects in an optimizer's groups")
