"""What each rank has written, as arrays and as bytes, and the chunks of all ranks joined by tensor.

The record of a rank is a header in JSON, then arrays. Rank 0 reads the records of all ranks when it commits. Most ranks
write the same tensors, scalars and names, so each of these is one block of bytes, and equal blocks are parsed once.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from hf_fsdp_plugin.checkpoint.formats.manifest import FileRecord, PackedRanges, pack_all

StatePath = tuple[str | int, ...]
"""Path of an entry in the nested state dict: ``("optimizer", "state", "lm_head.weight", "exp_avg")``."""
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


def flat_name(path: StatePath) -> str:
    """Return the name of an entry in ``.metadata``."""
    return ".".join(map(str, path))


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
    ranges = [pack_all(file.ranges, names) for file in record.files]
    blocks = [_block(list(names)), *ranges]
    for entries in record.entries:
        smalls = [[small.path, small.data.hex(), small.dtype, small.shape] for small in entries.smalls]
        blocks += [_block(value) for value in (entries.tensors, smalls, entries.aliases)]
        blocks.append(entries.chunks.tobytes())
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
            tensors, smalls = self._shared(_tensors, next(blocks)), self._shared(_smalls, next(blocks))
            aliases = self._shared(_aliases, next(blocks))
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


def _smalls(values: list[Any]) -> tuple[SmallEntry, ...]:
    return tuple(
        SmallEntry(tuple(path), bytes.fromhex(data), dtype, tuple(shape)) for path, data, dtype, shape in values
    )


def _aliases(values: list[Any]) -> tuple[Any, ...]:
    return tuple((tuple(alias), tuple(path)) for alias, path in values)
