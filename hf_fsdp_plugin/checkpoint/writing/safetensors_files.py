"""Safetensors files: model files that all ranks write, and one file per rank for the state dict type ``local``.

A safetensors file is a header and the tensors' bytes in row-major order. So the offsets of every shard are known before
anything is written: each rank writes its own byte ranges, and no rank gathers the model.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hf_fsdp_plugin.checkpoint.formats.boxes import Box, row_major
from hf_fsdp_plugin.checkpoint.formats.safetensors_layout import index_text, plan_files
from hf_fsdp_plugin.checkpoint.names import HF_MODEL, local_file, local_index
from hf_fsdp_plugin.checkpoint.shard_layout import LocalShard, Piece
from hf_fsdp_plugin.checkpoint.shards import ModelShards, OptimizerShards, shards_to_write
from hf_fsdp_plugin.checkpoint.writing.chunk_tables import FolderEntries, StatePath, Tensor, chunk_table
from hf_fsdp_plugin.checkpoint.writing.file_parts import FilePart, Item, shared_file, whole_file

MAX_SHARD_SIZE = 50 * 10**9
"""Maximum number of bytes of tensors in one safetensors file; the default of Transformers 5."""
_ONE_FILE = 2**63


def full_files(
    tensors: Sequence[LocalShard], rank: int, *, stem: str = HF_MODEL, max_shard_size: int = MAX_SHARD_SIZE
) -> tuple[list[FilePart], str | None]:
    """Return this rank's parts of the Hugging Face files of ``tensors``, and the text of the index for several files.

    All ranks pass the same tensors in the same order. Rank 0 adds the headers.
    """
    files = plan_files([(shard.name, shard.dtype_name, shard.shape) for shard in tensors], max_shard_size, stem)
    mine = shards_to_write(tensors)
    parts = []
    for file in files:
        items = [Item(0, (file.header,))] if rank == 0 else []
        for shard in mine:
            if shard.name in file.offsets:
                items += _runs(shard, file.offsets[shard.name])
        parts.append(shared_file(file.name, file.size, items))
    return parts, index_text(files)


def _runs(shard: LocalShard, begin: int) -> Iterator[Item]:
    """Yield the contiguous byte ranges of the shard in the file. The whole tensor begins at ``begin`` in the file."""
    strides = row_major(shard.shape)
    for piece in shard.pieces:
        dim = _first_contiguous_dim(piece.box, shard.shape)
        for index in itertools.product(*(range(size) for size in piece.box.sizes[:dim])):
            place = [*piece.box.offsets]
            for number, offset in enumerate(index):
                place[number] += offset
            element = sum(offset * stride for offset, stride in zip(place, strides, strict=True))
            yield Item(begin + element * shard.dtype.itemsize, (piece.tensor[index],), name=shard.name)


def _first_contiguous_dim(box: Box, shape: tuple[int, ...]) -> int:
    """Return the first dim from which the box is contiguous in the whole tensor, at fixed indices of earlier dims."""
    dim = len(shape)
    while dim > 0 and box.sizes[dim - 1] == shape[dim - 1]:
        dim -= 1
    return max(dim - 1, 0)


_Entries = dict[str, tuple[LocalShard, Piece, dict[str, str]]]
"""Name in the file -> shard, piece, and the names of the parameter and of the state."""


def local_model_file(folder: str, number: int, shards: ModelShards) -> tuple[FilePart, FolderEntries]:
    """Return a file with all pieces of the model on this rank, each with its offsets in the whole tensor."""
    entries: _Entries = {}
    for shard in shards.tensors:
        for piece in shard.pieces:
            entries[_entry_name(shard.name, piece)] = (shard, piece, {"name": shard.name})
    return _local_file(folder, number, entries, {"aliases": dict(shards.aliases)})


def local_optimizer_file(folder: str, number: int, shards: OptimizerShards) -> tuple[FilePart, FolderEntries]:
    """Return a file with this rank's optimizer state. Plain values and parameter groups are in its header."""
    entries: _Entries = {}
    values: dict[str, dict[str, Any]] = {}
    for name, state in shards.state.items():
        for key, value in state.items():
            if not isinstance(value, LocalShard):
                values.setdefault(name, {})[key] = value
                continue
            for piece in value.pieces:
                entries[_entry_name(f"{name}.{key}", piece)] = (value, piece, {"name": name, "key": key})
    return _local_file(folder, number, entries, {"values": values, "groups": list(shards.groups)})


def _entry_name(name: str, piece: Piece) -> str:
    return f"{name}@{','.join(map(str, piece.box.offsets))}"


def _local_file(folder: str, number: int, entries: _Entries, header: dict[str, Any]) -> tuple[FilePart, FolderEntries]:
    name = local_file(number, dist.get_rank())
    pieces = {
        entry: {**names, "shape": shard.shape, "offsets": piece.box.offsets}
        for entry, (shard, piece, names) in entries.items()
    }
    header = json.loads(json.dumps(header, default=_plain))
    described = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), **header, "pieces": pieces}
    tensors = [(entry, shard.dtype_name, piece.box.sizes) for entry, (shard, piece, _) in entries.items()]
    (file,) = plan_files(tensors, _ONE_FILE, metadata={"fsdp_local": json.dumps(described)})
    items = [Item(0, (file.header,))]
    keys: dict[StatePath, Tensor] = {}
    numbers: dict[StatePath, int] = {}
    chunks = []
    for entry, offset in file.offsets.items():
        shard, piece, names = entries[entry]
        item = Item(offset, (piece.tensor,), name=shard.name)
        items.append(item)
        path: StatePath = tuple(names.values())
        keys.setdefault(path, (path, shard.dtype_name, shard.shape))
        place = numbers.setdefault(path, len(numbers))
        chunks.append((place, offset, item.size, offset, piece.box.offsets, piece.box.sizes))
    aliases = [((alias,), (path,)) for alias, path in header.pop("aliases", {}).items()]
    index, table = local_index(number), chunk_table(chunks)
    own = FolderEntries(folder, name, list(keys.values()), table, (), aliases, index, header)
    return whole_file(f"{folder}/{name}", items), own


def _plain(value: Any) -> Any:
    """Convert a value for JSON. Hyperparameters may be scalar tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    raise TypeError(f"a local checkpoint cannot hold {type(value).__name__} objects in an optimizer's groups")
