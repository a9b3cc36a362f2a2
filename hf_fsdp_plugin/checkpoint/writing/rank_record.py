"""The record of what one rank has written, as bytes: a header in JSON, then arrays.

Rank 0 reads the records of all ranks when it commits. Most ranks write the same tensors, scalars and names, so each of
these is one block of bytes, and equal blocks are parsed once.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from hf_fsdp_plugin.checkpoint.formats.block_file import PackedRanges, pack_all
from hf_fsdp_plugin.checkpoint.formats.ranges import FileRecord
from hf_fsdp_plugin.checkpoint.writing.chunk_tables import FolderEntries, SmallEntry

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
