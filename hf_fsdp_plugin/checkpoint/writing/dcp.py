"""The layout of ``torch.distributed.checkpoint``, written without its planner: any tool that reads it reads ours.

Each rank has a file of ``torch.save`` entries; ``.metadata`` says which box of which tensor each one is. torch's own
planner exchanges plans between all ranks before every save; here each rank writes what it has, and whoever finishes the
checkpoint puts the ranks' lists together. Read against torch 2.13.0 (``distributed/checkpoint/filesystem.py``).
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

from hf_fsdp_plugin.checkpoint.names import DCP_METADATA
from hf_fsdp_plugin.checkpoint.names import dcp_file as dcp_file_name
from hf_fsdp_plugin.checkpoint.shards import Held
from hf_fsdp_plugin.checkpoint.writing.images import FileImage, Item, bytes_of, own_file
from hf_fsdp_plugin.torch_private.dcp import StorageInfo

StatePath = tuple[str | int, ...]
"""Where an entry stands in the nested state dict: ``("optimizer", "state", "lm_head.weight", "exp_avg")``."""
_ENTRY_ALIGNMENT = 64
_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a record in a zip archive: the lengths of its name and its extra field, which follow, and then the data."""


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
class Small:
    """A scalar tensor (``dtype`` and ``shape`` set, ``data`` its bytes) or any other object (``data`` as saved)."""

    path: StatePath
    data: bytes
    dtype: str | None = None
    shape: tuple[int, ...] = ()


@dataclass(slots=True)
class DcpPart:
    """What one rank adds to one folder.

    Attributes:
        folder: relative to the checkpoint.
        aliases: path of a tied name -> path of the entry that holds it.
    """

    folder: str
    chunks: list[Chunk] = field(default_factory=list)
    smalls: list[Small] = field(default_factory=list)
    aliases: list[tuple[StatePath, StatePath]] = field(default_factory=list)


def dcp_file(folder: str, rank: int, tensors: Iterable[tuple[StatePath, Held]]) -> tuple[FileImage, DcpPart]:
    """The rank's file in ``folder`` and the list of what is in it."""
    part = DcpPart(folder)
    file = dcp_file_name(rank)
    items: list[Item] = []
    at = 0
    for path, held in tensors:
        for piece in held.pieces:
            head, tail = _frame(held.dtype, piece.box.sizes)
            item = Item(at, (head, piece.tensor, tail), name=_tensor_name(path))
            items.append(item)
            part.chunks.append(
                Chunk(path, dtype_name(held.dtype), held.shape, piece.box.offsets, piece.box.sizes, file, at, item.size)
            )
            at = -(-item.stop // _ENTRY_ALIGNMENT) * _ENTRY_ALIGNMENT
    return own_file(f"{folder}/{file}", items), part


def scalar(path: StatePath, tensor: torch.Tensor) -> Small:
    data = bytes_of(tensor.detach().cpu()).numpy().tobytes()
    return Small(path, data, dtype_name(tensor.dtype), tuple(tensor.shape))


def plain_value(path: StatePath, value: Any) -> Small:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return Small(path, buffer.getvalue())


def last_files(folder: str, parts: Sequence[DcpPart]) -> list[FileImage]:
    """The files that complete a folder of which all ranks' parts are known: small entries, and ``.metadata``.

    Small entries that several ranks bring are the same on all of them; the first rank's is taken.
    """
    smalls: dict[StatePath, Small] = {}
    for part in parts:
        for small in part.smalls:
            smalls.setdefault(small.path, small)
    file = dcp_file_name(len(parts))
    items, stored = _small_items(smalls.values(), file)
    metadata = _metadata(parts, smalls.values(), stored)
    images = [own_file(f"{folder}/{DCP_METADATA}", [Item(0, (pickle.dumps(metadata),))])]
    return [own_file(f"{folder}/{file}", items), *images] if items else images


def _small_items(smalls: Iterable[Small], file: str) -> tuple[list[Item], dict[StatePath, StorageInfo]]:
    items, stored, at = [], {}, 0
    for small in smalls:
        contents: tuple[bytes, ...] = (small.data,)
        if small.dtype is not None:
            head, tail = _frame(getattr(torch, small.dtype), small.shape)
            contents = (head, small.data, tail)
        item = Item(at, contents, name=_tensor_name(small.path))
        items.append(item)
        stored[small.path] = StorageInfo(file, at, item.size)
        at = -(-item.stop // _ENTRY_ALIGNMENT) * _ENTRY_ALIGNMENT
    return items, stored


def _metadata(parts: Sequence[DcpPart], smalls: Iterable[Small], stored: Mapping[StatePath, StorageInfo]) -> Metadata:
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, StorageInfo] = {}
    paths: dict[str, StatePath] = {}
    for part in parts:
        for chunk in part.chunks:
            name = _flat_name(chunk.path)
            paths[name] = chunk.path
            tensor = entries.setdefault(name, _tensor_entry(chunk.dtype, chunk.shape))
            _add_chunk(name, tensor, storage, chunk)
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
    for alias, path in dict(pair for part in parts for pair in part.aliases).items():
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


def _add_chunk(name: str, tensor: TensorStorageMetadata, storage: dict[MetadataIndex, StorageInfo], c: Chunk) -> None:
    offsets = torch.Size(c.offsets)
    storage[MetadataIndex(name, offsets, len(tensor.chunks))] = StorageInfo(c.file, c.offset, c.length)
    tensor.chunks.append(ChunkStorageMetadata(offsets, torch.Size(c.sizes)))


@functools.lru_cache(maxsize=4096)
def _frame(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What ``torch.save`` writes before and after the bytes of a contiguous tensor.

    ``skip_data`` leaves a hole for them, of whatever size; their checksum in the archive is 0, which torch takes.
    """
    tensor = torch.empty(shape, dtype=dtype)  # never touched, so it costs no memory
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "archive.pt"  # the stem is the archive's name
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
    """Without the key that a state dict is saved under: ``lm_head.weight``, ``state.lm_head.weight.exp_avg``."""
    return _flat_name(path[1:])


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
