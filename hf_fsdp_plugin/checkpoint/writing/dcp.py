"""Writes the format of ``torch.distributed.checkpoint`` (DCP) without DCP's planner. Any DCP reader can read the files.

Each rank has a file of ``torch.save`` entries. ``.metadata`` maps each entry to a box of a tensor. torch's
planner exchanges plans between all ranks before every save. Here each rank writes its shards, and rank 0 joins the
ranks' lists of entries when it commits the checkpoint. Checked against torch 2.13.0
(``distributed/checkpoint/filesystem.py``).
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
import tempfile
import uuid
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import skip_data

from hf_fsdp_plugin.checkpoint.io import round_up
from hf_fsdp_plugin.checkpoint.names import DCP_METADATA, dcp_file
from hf_fsdp_plugin.checkpoint.shard_layout import LocalShard
from hf_fsdp_plugin.checkpoint.writing.file_parts import FilePart, Item, bytes_of, whole_file
from hf_fsdp_plugin.torch_private.functions import StorageInfo

StatePath = tuple[str | int, ...]
"""Path of an entry in the nested state dict: ``("optimizer", "state", "lm_head.weight", "exp_avg")``."""
_ENTRY_ALIGNMENT = 64
_LOCAL_HEADER = struct.Struct("<26xHH")
"""Header of a record in a zip archive, which contains the lengths of the name and the extra field that follow."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One entry of a file: a box of a tensor."""

    path: StatePath
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SmallEntry:
    """A scalar tensor (``data`` is its bytes), or any other object (``data`` is pickled, ``dtype`` is ``None``)."""

    path: StatePath
    data: bytes
    dtype: str | None = None
    shape: tuple[int, ...] = ()


@dataclass(slots=True)
class DcpEntries:
    """The entries that one rank adds to one DCP folder.

    Attributes:
        folder: path relative to the checkpoint.
        smalls: entries that are not in this rank's file: rank 0 writes them when it commits.
        aliases: (path of a tied name, path of the entry that holds its tensor).
    """

    folder: str
    chunks: list[Chunk] = field(default_factory=list)
    smalls: list[SmallEntry] = field(default_factory=list)
    aliases: list[tuple[StatePath, StatePath]] = field(default_factory=list)


def rank_file(folder: str, rank: int, tensors: Iterable[tuple[StatePath, LocalShard]]) -> tuple[FilePart, DcpEntries]:
    """Return the rank's file in ``folder``, and its entries."""
    entries = DcpEntries(folder)
    file = dcp_file(rank)
    items: list[Item] = []
    offset = 0
    for path, shard in tensors:
        for piece in shard.pieces:
            head, tail = _frame(shard.dtype, piece.box.sizes)
            item = Item(offset, (head, piece.tensor, tail), name=_tensor_name(path))
            items.append(item)
            box = piece.box
            entries.chunks.append(
                Chunk(path, shard.dtype_name, shard.shape, box.offsets, box.sizes, file, offset, item.size)
            )
            offset = round_up(item.stop, _ENTRY_ALIGNMENT)
    return whole_file(f"{folder}/{file}", items), entries


def scalar(path: StatePath, tensor: torch.Tensor) -> SmallEntry:
    data = bytes_of(tensor.detach().cpu()).numpy().tobytes()
    return SmallEntry(path, data, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def plain_value(path: StatePath, value: Any) -> SmallEntry:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return SmallEntry(path, buffer.getvalue())


def final_files(folder: str, ranks: Sequence[DcpEntries]) -> list[FilePart]:
    """Return the files that complete a folder, from the entries of all ranks: the small entries, and ``.metadata``.

    If several ranks have the same small entry, the first one is written.
    """
    smalls: dict[StatePath, SmallEntry] = {}
    for entries in ranks:
        for small in entries.smalls:
            smalls.setdefault(small.path, small)
    file = dcp_file(len(ranks))
    items, stored = _small_items(smalls.values(), file)
    metadata = _metadata(ranks, smalls.values(), stored)
    metadata_file = whole_file(f"{folder}/{DCP_METADATA}", [Item(0, (pickle.dumps(metadata),))])
    return [whole_file(f"{folder}/{file}", items), metadata_file] if items else [metadata_file]


def _small_items(smalls: Iterable[SmallEntry], file: str) -> tuple[list[Item], dict[StatePath, StorageInfo]]:
    items, stored, offset = [], {}, 0
    for small in smalls:
        contents: tuple[bytes, ...] = (small.data,)
        if small.dtype is not None:
            head, tail = _frame(getattr(torch, small.dtype), small.shape)
            contents = (head, small.data, tail)
        item = Item(offset, contents, name=_tensor_name(small.path))
        items.append(item)
        stored[small.path] = StorageInfo(file, offset, item.size)
        offset = round_up(item.stop, _ENTRY_ALIGNMENT)
    return items, stored


def _metadata(
    ranks: Sequence[DcpEntries], smalls: Iterable[SmallEntry], stored: Mapping[StatePath, StorageInfo]
) -> Metadata:
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, StorageInfo] = {}
    paths: dict[str, StatePath] = {}
    for listed in ranks:
        for chunk in listed.chunks:
            name, offsets = _flat_name(chunk.path), torch.Size(chunk.offsets)
            paths[name] = chunk.path
            chunks = entries.setdefault(name, _tensor_entry(chunk.dtype, chunk.shape)).chunks
            storage[MetadataIndex(name, offsets, len(chunks))] = StorageInfo(chunk.file, chunk.offset, chunk.length)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
    for small in smalls:
        name = _flat_name(small.path)
        paths[name] = small.path
        if small.dtype is None:
            entries[name] = BytesStorageMetadata()
            storage[MetadataIndex(name)] = stored[small.path]
        else:
            origin = torch.Size([0] * len(small.shape))
            entries[name] = _tensor_entry(small.dtype, small.shape)
            entries[name].chunks.append(ChunkStorageMetadata(origin, torch.Size(small.shape)))
            storage[MetadataIndex(name, origin, 0)] = stored[small.path]
    for alias, path in dict(pair for listed in ranks for pair in listed.aliases).items():
        name, of = _flat_name(alias), _flat_name(path)
        paths[name], entries[name] = alias, entries[of]
        for index, info in [(index, info) for index, info in storage.items() if index.fqn == of]:
            storage[MetadataIndex(name, index.offset, index.index)] = info
    return Metadata(
        state_dict_metadata=entries,
        planner_data=paths,
        storage_data=storage,
        storage_meta=StorageMeta(save_id=uuid.uuid4().hex),
        version=CURRENT_DCP_VERSION,
    )


def _tensor_entry(dtype: str, shape: tuple[int, ...]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, dtype)), torch.Size(shape), [])


@functools.lru_cache(maxsize=4096)
def _frame(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the bytes that ``torch.save`` writes before and after the data of a contiguous tensor.

    ``skip_data`` leaves a hole for the data. The data's checksum in the archive is 0, which torch accepts.
    """
    tensor = torch.empty(shape, dtype=dtype)  # never used, so it takes no memory
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "archive.pt"  # torch uses the stem as the name of the archive
        with skip_data():
            torch.save(tensor, path)
        with zipfile.ZipFile(path) as archive:
            record = archive.getinfo("archive/data/0")
        with path.open("rb") as file:
            file.seek(record.header_offset)
            header = file.read(_LOCAL_HEADER.size)
            begin = record.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
            file.seek(0)
            head = file.read(begin)
            file.seek(begin + tensor.numel() * tensor.element_size())
            return head, file.read()


def _flat_name(path: StatePath) -> str:
    return ".".join(map(str, path))


def _tensor_name(path: StatePath) -> str:
    """Return the name without the key of the state dict: ``lm_head.weight``, ``state.lm_head.weight.exp_avg``."""
    return _flat_name(path[1:])
