"""Writes the format of ``torch.distributed.checkpoint`` (DCP) without DCP's planner. Any DCP reader can read the files.

Each rank has a file of ``torch.save`` entries. ``.metadata`` maps each entry to a box of a tensor. torch's
planner exchanges plans between all ranks before every save. Here each rank writes its shards, and rank 0 joins the
ranks' lists of entries when it commits the checkpoint. Checked against torch 2.13.0
(``distributed/checkpoint/filesystem.py``).

The record of a rank, with which it tells rank 0 what it has written, is a header in JSON, then arrays. Most ranks write
the same tensors, scalars and names, so each of these is one block of bytes, and equal blocks are parsed once.
"""

from __future__ import annotations

import functools
import io
import json
import struct
import tempfile
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch.serialization import skip_data

from hf_fsdp_plugin.checkpoint.formats.index_file import METADATA_TAIL, index_bytes, pack_segments
from hf_fsdp_plugin.checkpoint.formats.manifest import FileRecord, PackedRanges
from hf_fsdp_plugin.checkpoint.io import round_up
from hf_fsdp_plugin.checkpoint.names import DCP_METADATA, ENTRY_ALIGNMENT, INDEX_FILE, dcp_file
from hf_fsdp_plugin.checkpoint.shards import LocalShard
from hf_fsdp_plugin.checkpoint.writing.dcp_metadata import MetadataPickle, StatePath, flat_name
from hf_fsdp_plugin.checkpoint.writing.parts import FilePart, Item, bytes_of, whole_file

Tensor = tuple[StatePath, str, tuple[int, ...]]
"""Path, dtype and global shape."""
_FIXED = 4


@dataclass(frozen=True, slots=True)
class SmallEntry:
    """A scalar tensor (``data`` is its bytes), or any other object (``data`` is pickled, ``dtype`` is ``None``)."""

    path: StatePath
    data: bytes
    dtype: str | None = None
    shape: tuple[int, ...] = ()


@dataclass(slots=True)
class FolderEntries:
    """The entries that one rank adds to one folder.

    Attributes:
        folder: path relative to the checkpoint.
        file: name of this rank's file in it.
        tensors: the tensors of which the file contains chunks. Ranks with equal tensors may share one sequence.
        chunks: int64, a row for each chunk: number of the tensor, first byte and number of bytes of the entry, byte
            offset of the chunk's first element, offsets, sizes. Unused dims are 0.
        smalls: entries that are not in this rank's file: rank 0 writes them when it commits.
        aliases: (path of a tied name, path of the entry that holds its tensor).
    """

    folder: str
    file: str
    tensors: Sequence[Tensor]
    chunks: NDArray[Any]
    smalls: Sequence[SmallEntry] = ()
    aliases: Sequence[tuple[StatePath, StatePath]] = ()


def chunk_table(chunks: Sequence[tuple[int, int, int, int, Sequence[int], Sequence[int]]]) -> NDArray[Any]:
    """Return the rows of :attr:`FolderEntries.chunks` from tuples of their columns."""
    ndim = max((len(offsets) for *_, offsets, _ in chunks), default=0)
    table = numpy.zeros((len(chunks), _FIXED + 2 * ndim), dtype=numpy.int64)
    for row, (*fixed, offsets, sizes) in zip(table, chunks, strict=True):
        row[:_FIXED] = fixed
        row[_FIXED : _FIXED + len(offsets)] = offsets
        row[_FIXED + ndim : _FIXED + ndim + len(sizes)] = sizes
    return table


class JoinedChunks:
    """The chunks of all ranks, by tensor, in the order of the ranks.

    No loop over chunks: with 1,024 ranks there are millions.
    """

    def __init__(self, ranks: Sequence[FolderEntries]) -> None:
        self.tensors: list[Tensor] = []
        numbers: dict[StatePath, int] = {}
        of_rank: dict[int, NDArray[Any]] = {}  # the ranks' sequences are alive, so that their ids are distinct
        for entries in ranks:
            if id(entries.tensors) not in of_rank:
                for tensor in entries.tensors:
                    if numbers.setdefault(tensor[0], len(self.tensors)) == len(self.tensors):
                        self.tensors.append(tensor)
                of_rank[id(entries.tensors)] = numpy.array(
                    [numbers[path] for path, _, _ in entries.tensors], dtype="i8"
                )
        self.numbers = numbers
        self._ndim = max((len(shape) for _, _, shape in self.tensors), default=0)
        total = sum(len(entries.chunks) for entries in ranks)
        rows = numpy.zeros((total, _FIXED + 2 * self._ndim), dtype=numpy.int64)
        tensors = numpy.zeros(total, dtype=numpy.int64)
        at = 0
        for rank, entries in enumerate(ranks):
            table, stop = entries.chunks, at + len(entries.chunks)
            ndim = (table.shape[1] - _FIXED) // 2
            if at < stop:
                tensors[at:stop] = of_rank[id(entries.tensors)][table[:, 0]]
            rows[at:stop, 0] = rank
            rows[at:stop, 1:_FIXED] = table[:, 1:_FIXED]
            rows[at:stop, _FIXED : _FIXED + ndim] = table[:, _FIXED : _FIXED + ndim]
            rows[at:stop, _FIXED + self._ndim : _FIXED + self._ndim + ndim] = table[:, _FIXED + ndim :]
            at = stop
        self._rows = rows
        self._order = numpy.argsort(tensors, kind="stable")
        self._starts = numpy.searchsorted(tensors[self._order], numpy.arange(len(self.tensors) + 1))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[Tensor, NDArray[Any]]]:
        """Yield each tensor with its chunks: rank, first byte, number of bytes, first element, offsets, sizes."""
        for number, tensor in enumerate(self.tensors):
            yield tensor, self.of(number)

    def of(self, number: int) -> NDArray[Any]:
        """Return the chunks of the tensor ``tensors[number]``."""
        ndim = len(self.tensors[number][2])
        rows = self._rows.take(self._order[self._starts[number] : self._starts[number + 1]], axis=0)
        sizes = _FIXED + self._ndim
        return numpy.concatenate([rows[:, : _FIXED + ndim], rows[:, sizes : sizes + ndim]], axis=1)


_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The files that one rank has written and synced, and the entries in them."""

    files: tuple[FileRecord, ...]
    entries: tuple[FolderEntries, ...]


def record_bytes(record: RankRecord) -> bytes:
    names: dict[str, int] = {}
    ranges = [PackedRanges.of(file.ranges, names).data for file in record.files]
    blocks = [_block(list(names)), *ranges]
    for entries in record.entries:
        smalls = [[small.path, small.data.hex(), small.dtype, small.shape] for small in entries.smalls]
        blocks += [_block(entries.tensors), _block([smalls, entries.aliases]), entries.chunks.tobytes()]
    header = {
        "files": [[file.path, file.size] for file in record.files],
        "entries": [[own.folder, own.file, own.chunks.shape[1]] for own in record.entries],
        "lengths": [len(block) for block in blocks],
    }
    data = json.dumps(header).encode()
    return b"".join([_LENGTH.pack(len(data)), data, *blocks])


class RecordReader:
    """Reads the records of the ranks of one save. Equal blocks become the same object."""

    def __init__(self) -> None:
        self._known: dict[tuple[Callable[..., Any], bytes], Any] = {}

    def read(self, data: bytes) -> RankRecord:
        (length,) = _LENGTH.unpack_from(data)
        header = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        blocks = _split(memoryview(data)[_LENGTH.size + length :], header["lengths"])
        names = self._shared(tuple, next(blocks))
        files = tuple(
            FileRecord(path=path, size=size, ranges=PackedRanges(next(blocks), names)) for path, size in header["files"]
        )
        found = []
        for folder, file, width in header["entries"]:
            tensors = self._shared(_tensors, next(blocks))
            smalls, aliases = self._shared(_smalls_and_aliases, next(blocks))
            chunks = numpy.frombuffer(next(blocks), dtype=numpy.int64).reshape(-1, width)
            found.append(FolderEntries(folder, file, tensors, chunks, smalls, aliases))
        return RankRecord(files, tuple(found))

    def _shared(self, convert: Callable[[Any], Any], block: memoryview) -> Any:
        key = convert, bytes(block)
        if key not in self._known:
            self._known[key] = convert(json.loads(zlib.decompress(block)))
        return self._known[key]


def _block(value: Sequence[Any]) -> bytes:
    return zlib.compress(json.dumps(value).encode(), level=1)


def _split(data: memoryview, lengths: Sequence[int]) -> Iterator[memoryview]:
    at = 0
    for length in lengths:
        yield data[at : at + length]
        at += length


def _tensors(values: list[Any]) -> tuple[Any, ...]:
    return tuple((tuple(path), dtype, tuple(shape)) for path, dtype, shape in values)


def _smalls_and_aliases(values: list[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    smalls, aliases = values
    return (
        tuple(SmallEntry(tuple(path), bytes.fromhex(data), dtype, tuple(shape)) for path, data, dtype, shape in smalls),
        tuple((tuple(alias), tuple(path)) for alias, path in aliases),
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
