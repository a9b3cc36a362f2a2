"""Writes the format of ``torch.distributed.checkpoint`` (DCP) without DCP's planner. Any DCP reader can read the files.

Each rank has a file of ``torch.save`` entries. ``.metadata`` maps each entry to a box of a tensor. torch's
planner exchanges plans between all ranks before every save. Here each rank writes its shards, and rank 0 joins the
ranks' lists of entries when it commits the checkpoint, with torch's own classes. Checked against torch 2.13.0
(``distributed/checkpoint/filesystem.py``).
"""

from __future__ import annotations

import functools
import io
import pickle
import tempfile
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.serialization import skip_data

from hf_fsdp_plugin.backends.torch_types import move_scalars
from hf_fsdp_plugin.checkpoint.file_io import open_for_reading, sync, without_collection
from hf_fsdp_plugin.checkpoint.formats.manifest import FileRecord
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StatePath, TiedPaths, entry_name
from hf_fsdp_plugin.checkpoint.formats.torch_files import TorchZip
from hf_fsdp_plugin.checkpoint.names import DCP_METADATA, ENTRY_ALIGNMENT, dcp_file
from hf_fsdp_plugin.checkpoint.saved_state import LocalShard, shards_to_write
from hf_fsdp_plugin.checkpoint.writing.file_parts import Content, FilePart, Item, PartWriter, bytes_of, whole_file
from hf_fsdp_plugin.torch_private.functions import StorageInfo


class Chunk(NamedTuple):
    """A box of a tensor, and the first byte and the number of bytes of its archive in the file."""

    offsets: Sequence[int]
    sizes: Sequence[int]
    start: int
    length: int


class WrittenTensor(NamedTuple):
    """A tensor with its global shape, and the chunks of it in the file of one rank."""

    path: StatePath
    dtype: str
    shape: Sequence[int]
    chunks: Sequence[Chunk]


class SmallEntry(NamedTuple):
    """A scalar tensor (``data`` is its bytes), or any other object (``data`` is pickled, ``dtype`` is ``None``)."""

    path: StatePath
    data: bytes
    dtype: str | None = None


class FolderEntries(NamedTuple):
    """The entries that one rank adds to one folder.

    Attributes:
        folder: path relative to the checkpoint.
        file: name of this rank's file in it.
        tensors: the tensors of which the file contains chunks.
        smalls: entries that are not in this rank's file: rank 0 writes them when it commits.
        aliases: the other names of tied tensors.
    """

    folder: str
    file: str
    tensors: Sequence[WrittenTensor]
    smalls: Sequence[SmallEntry] = ()
    aliases: TiedPaths = ()


@dataclass(frozen=True, slots=True)
class StateFiles:
    """This rank's part of a model's or an optimizer's files, and the entries that rank 0 lists in ``.metadata``."""

    parts: list[FilePart]
    entries: tuple[FolderEntries, ...] = ()


def rank_file(
    folder: str,
    tensors: Sequence[tuple[StatePath, LocalShard]],
    values: Mapping[StatePath, Any],
    aliases: TiedPaths,
    rank: int,
) -> StateFiles:
    """Return the file of a rank in ``folder``, and its entries. Each tensor is in the file of one of its replicas.

    Scalars and objects are in no rank's file: rank 0 writes them when it commits.
    """
    scalars = {path: shard for path, shard in tensors if not shard.shape}
    read = move_scalars({path: shard.pieces[0].tensor for path, shard in scalars.items()}, torch.device("cpu"))
    smalls = [
        SmallEntry(path, bytes_of(read[path]).numpy().tobytes(), shard.dtype_name) for path, shard in scalars.items()
    ]
    for path, value in values.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        smalls.append(SmallEntry(path, buffer.getvalue()))
    file = dcp_file(rank)
    paths = {shard.name: path for path, shard in tensors}
    items: list[Item] = []
    entries: list[WrittenTensor] = []
    for shard in shards_to_write(shard for _, shard in tensors if shard.shape):
        chunks = []
        for piece in shard.pieces:
            head, tail = _frame(shard.dtype, piece.box.sizes)
            start = _add_item(items, (head, piece.tensor, tail), paths[shard.name])
            chunks.append(Chunk(piece.box.offsets, piece.box.sizes, start, items[-1].stop - start))
        entries.append(WrittenTensor(paths[shard.name], shard.dtype_name, shard.shape, chunks))
    own = FolderEntries(folder, file, entries, smalls, aliases)
    return StateFiles([whole_file(f"{folder}/{file}", items)], (own,))


class _MetadataBuilder:
    """Builds the ``Metadata`` of one folder. The order of the chunks is that of the calls."""

    def __init__(self) -> None:
        storage_meta = dcp.StorageMeta(save_id=uuid.uuid4().hex)
        self.metadata = dcp.Metadata({}, {}, {}, storage_meta, CURRENT_DCP_VERSION)
        self._sizes = functools.cache(torch.Size)  # ranks have shards of equal sizes: pickled once

    def add_tensor(self, file: str, entry: WrittenTensor) -> None:
        name = self._add_name(entry.path)
        tensor = self.metadata.state_dict_metadata.get(name)
        if tensor is None:
            properties = dcp.TensorProperties(dtype=getattr(torch, entry.dtype))
            tensor = dcp.TensorStorageMetadata(properties, torch.Size(entry.shape), [])
            self.metadata.state_dict_metadata[name] = tensor
        assert isinstance(tensor, dcp.TensorStorageMetadata)
        for offsets, sizes, start, length in entry.chunks:
            place = dcp.MetadataIndex(name, offsets, len(tensor.chunks))
            assert place.offset is not None
            self.metadata.storage_data[place] = StorageInfo(file, start, length)
            tensor.chunks.append(dcp.ChunkStorageMetadata(place.offset, self._sizes(tuple(sizes))))

    def add_object(self, file: str, path: StatePath, start: int, length: int) -> None:
        name = self._add_name(path)
        self.metadata.state_dict_metadata[name] = dcp.BytesStorageMetadata()
        self.metadata.storage_data[dcp.MetadataIndex(name)] = StorageInfo(file, start, length)

    def add_alias(self, alias: StatePath, path: StatePath) -> None:
        """Add another name of a tensor that has been added."""
        name, held = self._add_name(alias), entry_name(path)
        tensor = self.metadata.state_dict_metadata[held]
        assert isinstance(tensor, dcp.TensorStorageMetadata)
        self.metadata.state_dict_metadata[name] = tensor
        for number, chunk in enumerate(tensor.chunks):
            place = self.metadata.storage_data[dcp.MetadataIndex(held, chunk.offsets)]
            self.metadata.storage_data[dcp.MetadataIndex(name, chunk.offsets, number)] = place

    def _add_name(self, path: StatePath) -> str:
        name = entry_name(path)
        self.metadata.planner_data[name] = path
        return name


@without_collection()
def complete_folders(root: Path, ranks: Iterable[Sequence[FolderEntries]]) -> list[FileRecord]:
    """Write the files that complete each folder of a checkpoint: those with small entries, and ``.metadata``.

    Called by rank 0 when all ranks have written their files.

    Args:
        ranks: the entries of each rank.

    Returns:
        The records of the files with small entries. ``.metadata`` is recorded like the files that others write.
    """
    by_folder: dict[str, list[FolderEntries]] = {}
    for own in (each for entries in ranks for each in entries):
        by_folder.setdefault(own.folder, []).append(own)
    return [record for entries in by_folder.values() for record in _complete_folder(root, entries)]


def _complete_folder(root: Path, ranks: Sequence[FolderEntries]) -> list[FileRecord]:
    builder = _MetadataBuilder()
    for own in ranks:
        for entry in own.tensors:
            builder.add_tensor(own.file, entry)
    smalls: dict[StatePath, SmallEntry] = {}
    for small in (small for own in ranks for small in own.smalls):
        smalls.setdefault(small.path, small)  # several ranks may have the same entry: the first one is written
    folder, file = ranks[0].folder, dcp_file(len(ranks))
    items: list[Item] = []
    for path, data, dtype in smalls.values():
        head, tail = _frame(getattr(torch, dtype), ()) if dtype is not None else (b"", b"")
        start = _add_item(items, (head, data, tail), path)
        length = items[-1].stop - start
        if dtype is None:
            builder.add_object(file, path, start, length)
        else:
            builder.add_tensor(file, WrittenTensor(path, dtype, (), [Chunk((), (), start, length)]))
    for alias, path in dict(pair for own in ranks for pair in own.aliases).items():
        builder.add_alias(alias, path)
    records = PartWriter().write(root, [whole_file(f"{folder}/{file}", items)] if items else [])
    place = root / folder / DCP_METADATA
    with place.open("wb") as opened:  # in parts: between them, the thread of the training can run
        pickle.dump(builder.metadata, opened)
    sync(place)
    return records


def _add_item(items: list[Item], contents: tuple[Content, ...], path: StatePath) -> int:
    """Add an archive to a file, after zeros up to an aligned offset. Returns its offset."""
    end = items[-1].stop if items else 0
    padding = bytes(-end % ENTRY_ALIGNMENT)
    # The name is without the key of the state dict: lm_head.weight, state.lm_head.weight.exp_avg.
    items.append(Item(end, (padding, *contents), name=entry_name(path[1:])))
    return end + len(padding)


@functools.lru_cache(maxsize=4096)
def _frame(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the bytes that ``torch.save`` writes before and after the data of a contiguous tensor.

    ``skip_data`` leaves a hole for the data. The data's checksum in the archive is 0, which torch accepts.
    """
    tensor = torch.empty(shape, dtype=dtype, device="cpu")  # never used, so it takes no memory
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "archive.pt"  # torch uses the stem as the name of the archive
        with skip_data():
            torch.save(tensor, path)
        with open_for_reading(path) as file:
            begin = TorchZip(file, 0, path.stat().st_size, path).offset("data/0")
            head = file.read(begin)
            file.seek(begin + tensor.nbytes)
            return head, file.read()
