"""The file with the hashes of a large checkpoint: a table of blocks with records of fixed size.

A rank reads only the records of the bytes that it reads. ``docs/manifest.md`` is the specification.
"""

from __future__ import annotations

import os
import struct
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

from hf_fsdp_plugin.checkpoint.formats.errors import refuse
from hf_fsdp_plugin.checkpoint.formats.hashing import hash_file
from hf_fsdp_plugin.checkpoint.formats.ranges import FileRange
from hf_fsdp_plugin.checkpoint.io import reading

_RECORD = struct.Struct("<QQI16s")
RECORD_SIZE = _RECORD.size
_FIELDS = [("start", "<u8"), ("stop", "<u8"), ("name", "<u4"), ("hash", "V16")]
_PAGE = 1024
"""Number of records that are read at once."""


def pack(ranges: Iterable[FileRange], names: dict[str, int]) -> bytes:
    """Return the records of the ranges that are not empty. New names are added to ``names``, with their index."""
    return b"".join(
        _RECORD.pack(item.start, item.stop, names.setdefault(item.name, len(names)), bytes.fromhex(item.hash))
        for item in ranges
        if item.start < item.stop
    )


def pack_all(ranges: Iterable[FileRange], names: dict[str, int]) -> bytes:
    """Return the records of all ranges, also of the empty ones."""
    return b"".join(
        _RECORD.pack(item.start, item.stop, names.setdefault(item.name, len(names)), bytes.fromhex(item.hash))
        for item in ranges
    )


class _Ranges(Sequence[FileRange]):
    """Ranges of one file that are created when they are accessed."""

    @overload
    def __getitem__(self, index: int) -> FileRange: ...
    @overload
    def __getitem__(self, index: slice) -> list[FileRange]: ...
    def __getitem__(self, index: int | slice) -> FileRange | list[FileRange]:
        numbers = range(len(self))[index]  # raises IndexError
        return [self._at(number) for number in numbers] if isinstance(numbers, range) else self._at(numbers)

    @abstractmethod
    def _at(self, number: int) -> FileRange:
        """Return the range with this number, which is at least 0 and below the length."""


class PackedRanges(_Ranges):
    """The ranges of one file as the records of :func:`pack_all`: a range is created only when it is accessed."""

    def __init__(self, data: bytes | memoryview, names: Sequence[str]) -> None:
        self._data, self._names = data, names

    def __len__(self) -> int:
        return len(self._data) // RECORD_SIZE

    def _at(self, number: int) -> FileRange:
        start, stop, name, digest = _RECORD.unpack_from(self._data, number * RECORD_SIZE)
        return FileRange(start=start, stop=stop, hash=digest.hex(), name=self._names[name])

    def packed(self, names: dict[str, int], numbers: dict[int, Any]) -> bytes:
        """Return what :func:`pack` returns for these ranges.

        Args:
            numbers: the numbers of the names of earlier calls with the same ``names``, by the id of the sequence.
        """
        import numpy

        if id(self._names) not in numbers:
            numbers[id(self._names)] = numpy.array([names.setdefault(name, len(names)) for name in self._names], "<u4")
        records = numpy.frombuffer(self._data, _FIELDS)
        records = records[records["start"] < records["stop"]]
        if len(records):
            records["name"] = numbers[id(self._names)][records["name"]]
        return records.tobytes()


def joined_ranges(parts: Sequence[Sequence[FileRange]]) -> Sequence[FileRange]:
    """Return the ranges of a file that several ranks have written, in the order of their bytes."""
    if len(parts) == 1:
        return parts[0]
    import numpy

    names: dict[str, int] = {}
    numbers: dict[int, Any] = {}
    packed = []
    for part in parts:
        packed.append(part.packed(names, numbers) if isinstance(part, PackedRanges) else pack(part, names))
    records = numpy.frombuffer(b"".join(packed), _FIELDS)
    return PackedRanges(records[numpy.argsort(records["start"], kind="stable")].tobytes(), tuple(names))


class BlockTable(_Ranges):
    """The blocks of one file of the checkpoint, read in pages when they are needed.

    Args:
        path: the file with the records.
        first, count: the records of this file.
        size: size of the file that they describe, in bytes.
        digest: hash of the records.
        names: the names to which records refer.

    Raises:
        CheckpointError: from every access, if the records are damaged.
    """

    def __init__(self, path: Path, first: int, count: int, *, size: int, digest: str, names: Sequence[str]) -> None:
        self._path, self._first, self._count = path, first, count
        self._size, self._digest, self._names = size, digest, names
        self._pages: dict[int, list[FileRange]] = {}

    def __len__(self) -> int:
        return self._count

    def _at(self, number: int) -> FileRange:
        page, position = divmod(number, _PAGE)
        if page not in self._pages:
            self._pages[page] = self._read(page * _PAGE)
        return self._pages[page][position]

    def check(self) -> None:
        """Compare all records of the file with their hash. Raises ``CheckpointError`` if they differ."""
        start = self._first * RECORD_SIZE
        if hash_file(self._path, start, start + self._count * RECORD_SIZE) != self._digest:
            self._damaged("its records differ from what was saved")

    def _read(self, start: int) -> list[FileRange]:
        count = min(_PAGE, self._count - start)
        try:
            with reading(self._path) as file:
                data = os.pread(file.fileno(), count * RECORD_SIZE, (self._first + start) * RECORD_SIZE)
        except OSError as error:
            refuse("FSDP-E472", self._path, f"cannot be read: {error.strerror}.")
        if len(data) < count * RECORD_SIZE:
            self._damaged("it ends too early")
        found = []
        at = 0 if start == 0 else None
        for low, high, name, digest in _RECORD.iter_unpack(data):
            if (at is not None and low != at) or low >= high or name >= len(self._names):
                self._damaged(f"the record of the bytes {low:,} to {high:,} is not valid")
            found.append(FileRange(start=low, stop=high, hash=digest.hex(), name=self._names[name]))
            at = high
        if start + count == self._count and at != self._size:
            self._damaged(f"its records end at byte {at:,} of {self._size:,}")
        return found

    def _damaged(self, how: str) -> None:
        refuse("FSDP-E464", self._path, f"is damaged: {how}.")
