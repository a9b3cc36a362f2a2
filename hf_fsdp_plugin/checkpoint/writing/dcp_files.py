"""Writes the format of ``torch.distributed.checkpoint`` (DCP) without DCP's planner. Any DCP reader can read the files.

Each rank has a file of ``torch.save`` entries. ``.metadata`` maps each entry to a box of a tensor. torch's
planner exchanges plans between all ranks before every save. Here each rank writes its shards, and rank 0 joins the
ranks' lists of entries when it commits the checkpoint. Checked against torch 2.13.0
(``distributed/checkpoint/filesystem.py``).
"""

from __future__ import annotations

import functools
import io
import struct
import tempfile
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.serialization import skip_data

from hf_fsdp_plugin.checkpoint.formats.index_file import METADATA_TAIL, index_bytes, pack_segments
from hf_fsdp_plugin.checkpoint.io import round_up
from hf_fsdp_plugin.checkpoint.names import DCP_METADATA, ENTRY_ALIGNMENT, INDEX_FILE, dcp_file
from hf_fsdp_plugin.checkpoint.shards import LocalShard
from hf_fsdp_plugin.checkpoint.writing.dcp_metadata import MetadataPickle
from hf_fsdp_plugin.checkpoint.writing.parts import FilePart, Item, bytes_of, whole_file
from hf_fsdp_plugin.checkpoint.writing.rank_record import (
    FolderEntries,
    JoinedChunks,
    SmallEntry,
    StatePath,
    Tensor,
    chunk_table,
    flat_name,
)

MIN_INDEXED = 5_000
"""Minimum number of chunks of a folder with an index. Each rank reads the metadata of all ranks of smaller ones."""

Value = tuple[StatePath, int, int, int]
"""Path of a small entry, number of its file, first byte and number of bytes."""


def index_part(
    path: str,
    joined: JoinedChunks,
    files: Sequence[str],
    aliases: Mapping[StatePath, StatePath],
    *,
    values: Sequence[Value],
    metadata: tuple[int, str],
) -> FilePart:
    """Return the index. The arguments are those of :func:`index_bytes`."""
    tensors = []
    for (tensor, dtype, shape), chunks in joined:
        places = numpy.delete(chunks[:, : 4 + len(shape)], (1, 2), axis=1)
        tensors.append((tensor, dtype, shape, pack_segments(places, chunks[:, 4 + len(shape) :])))
    data = index_bytes(tensors, values, list(aliases.items()), files, metadata)
    return whole_file(path, [Item(0, (data,))])


def joined_aliases(ranks: Sequence[FolderEntries]) -> dict[StatePath, StatePath]:
    """Return the aliases of all ranks, most of which share one sequence."""
    distinct = {id(entries.aliases): entries.aliases for entries in ranks}
    return {alias: path for aliases in distinct.values() for alias, path in aliases}


_LOCAL_HEADER = struct.Struct("<26xHH")
"""Header of a record in a zip archive, which contains the lengths of the name and the extra field that follow."""


def rank_file(
    folder: str,
    rank: int,
    tensors: Iterable[tuple[StatePath, LocalShard]],
    smalls: Sequence[SmallEntry] = (),
    aliases: Sequence[tuple[StatePath, StatePath]] = (),
) -> tuple[FilePart, FolderEntries]:
    """Return the rank's file in ``folder``, and its entries."""
    file = dcp_file(rank)
    items: list[Item] = []
    keys: list[Tensor] = []
    chunks = []
    offset = 0
    for path, shard in tensors:
        for piece in shard.pieces:
            head, tail = _frame(shard.dtype, piece.box.sizes)
            item = Item(offset, (head, piece.tensor, tail), name=_tensor_name(path))
            items.append(item)
            chunks.append((len(keys), offset, item.size, offset + len(head), piece.box.offsets, piece.box.sizes))
            offset = round_up(item.stop, ENTRY_ALIGNMENT)
        keys.append((path, shard.dtype_name, shard.shape))
    return whole_file(f"{folder}/{file}", items), FolderEntries(
        folder, file, keys, chunk_table(chunks), smalls, aliases
    )


def scalars(tensors: Mapping[StatePath, torch.Tensor]) -> list[SmallEntry]:
    """Return the entries of scalars, which are read from their devices with one copy per device and dtype."""
    data: dict[StatePath, bytes] = {}
    groups: dict[tuple[torch.device, torch.dtype], dict[StatePath, torch.Tensor]] = {}
    for path, tensor in tensors.items():
        groups.setdefault((tensor.device, tensor.dtype), {})[path] = tensor.detach()
    for group in groups.values():
        for path, value in zip(group, torch.stack(list(group.values())).cpu(), strict=True):
            data[path] = bytes_of(value).numpy().tobytes()
    return [
        SmallEntry(path, data[path], str(tensor.dtype).removeprefix("torch."), ()) for path, tensor in tensors.items()
    ]


def plain_value(path: StatePath, value: Any) -> SmallEntry:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return SmallEntry(path, buffer.getvalue())


def final_files(ranks: Sequence[Sequence[FolderEntries]]) -> Iterator[list[FilePart]]:
    """Yield the files that rank 0 adds to each folder that the ranks have written to.

    Args:
        ranks: what each rank has written.
    """
    by_folder: dict[str, list[FolderEntries]] = {}
    for own in ranks:
        for entries in own:
            by_folder.setdefault(entries.folder, []).append(entries)
    yield from map(_files_of_folder, by_folder.values())


def _files_of_folder(ranks: Sequence[FolderEntries]) -> list[FilePart]:
    """Return the files that complete a folder, from the entries of all ranks: small entries, ``.metadata``, the index.

    If several ranks have the same small entry, the first one is written. A small folder has no index.
    """
    folder = ranks[0].folder
    smalls: dict[StatePath, SmallEntry] = {}
    # Most ranks share one sequence, which may be as long as the list of the tensors.
    for shared in {id(entries.smalls): entries.smalls for entries in ranks}.values():
        for small in shared:
            smalls.setdefault(small.path, small)
    aliases = joined_aliases(ranks)
    files = [*(entries.file for entries in ranks), dcp_file(len(ranks))]
    items, values = _small_items(smalls.values(), len(ranks))
    joined = JoinedChunks(ranks)
    save_id = uuid.uuid4().hex
    parts = _metadata(joined, smalls.values(), values, aliases, files, save_id)
    metadata = whole_file(f"{folder}/{DCP_METADATA}", [Item(0, parts)])
    found = [whole_file(f"{folder}/{files[-1]}", items), metadata] if items else [metadata]
    if len(joined) >= MIN_INDEXED:
        last = b"".join(parts[-2:])[-METADATA_TAIL:].hex()
        path = f"{folder}/{INDEX_FILE}"
        found.append(index_part(path, joined, files, aliases, values=values, metadata=(metadata.size, last)))
    return found


def _small_items(smalls: Iterable[SmallEntry], file: int) -> tuple[list[Item], list[Value]]:
    items, values, offset = [], [], 0
    for small in smalls:
        contents: tuple[bytes, ...] = (small.data,)
        if small.dtype is not None:
            head, tail = _frame(getattr(torch, small.dtype), small.shape)
            contents = (head, small.data, tail)
        item = Item(offset, contents, name=_tensor_name(small.path))
        items.append(item)
        values.append((small.path, file, offset, item.size))
        offset = round_up(item.stop, ENTRY_ALIGNMENT)
    return items, values


def _metadata(
    joined: JoinedChunks,
    smalls: Iterable[SmallEntry],
    values: Iterable[Value],
    aliases: Mapping[StatePath, StatePath],
    files: Sequence[str],
    save_id: str,
) -> tuple[bytes, ...]:
    pickled = MetadataPickle(files, save_id)
    for (path, dtype, shape), chunks in joined:
        pickled.add_tensor(path, dtype, shape, numpy.delete(chunks, 3, axis=1))
    scalars = {}
    for small, (path, file, start, length) in zip(smalls, values, strict=True):
        if small.dtype is None:
            pickled.add_value(path, file, start, length)
        else:
            scalars[path] = numpy.array([[file, start, length, *(0 for _ in small.shape), *small.shape]])
            pickled.add_tensor(path, small.dtype, small.shape, scalars[path])
    for alias, path in aliases.items():
        chunks = scalars[path] if path in scalars else numpy.delete(joined.of(joined.numbers[path]), 3, axis=1)
        pickled.add_alias(alias, path, chunks)
    return pickled.finished()


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


def _tensor_name(path: StatePath) -> str:
    """Return the name without the key of the state dict: ``lm_head.weight``, ``state.lm_head.weight.exp_avg``."""
    return flat_name(path[1:])
