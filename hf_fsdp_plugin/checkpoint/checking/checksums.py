"""The CRC-32 checksums of the zip archives that ``torch.save`` writes.

A ``.bin`` or ``.pt`` file is one archive; a ``.distcp`` file is a sequence of archives. They are read from the end of
the file, because the directory of a zip is at its end: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 1 << 20
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_FULL = 0xFFFFFFFF
"""The content of a 32-bit field if its value is in the zip64 extra field."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An uncompressed entry: bytes ``[start, stop)`` of the file. ``crc`` is 0 if the writer did not compute it."""

    start: int
    stop: int
    crc: int


class NotAnArchive(ValueError):
    """The bytes before ``stop`` are not a complete zip archive."""

    def __init__(self, stop: int) -> None:
        super().__init__(f"the bytes before {stop:,} are not a complete zip archive")
        self.stop = stop


def is_archive(path: Path) -> bool:
    """Whether a file has the signature of a zip archive."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def crc_file(path: Path, start: int, stop: int) -> int:
    """Return the CRC-32 of the bytes ``[start, stop)`` of a file, or up to its end if that is earlier."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        while start < stop and (block := os.pread(file.fileno(), min(_BLOCK, stop - start), start)):
            crc = zlib.crc32(block, crc)
            start += len(block)
    return crc


def stored_entries(path: Path) -> Iterator[StoredEntry]:
    """Yield every uncompressed entry of every archive in the file, the last archive first.

    Raises:
        NotAnArchive: some bytes of the file do not belong to a complete archive.
    """
    with path.open("rb", buffering=0) as file:
        stop = os.fstat(file.fileno()).st_size
        while stop > 0:
            try:
                start, entries = _archive(file.fileno(), stop)
            except (struct.error, OverflowError):  # an offset outside the file
                raise NotAnArchive(stop) from None
            yield from entries
            stop = start


def _archive(descriptor: int, stop: int) -> tuple[int, list[StoredEntry]]:
    """Return the first byte of the archive that ends at ``stop``, and its entries."""
    directory, size, start = _directory(descriptor, stop)
    text = _read(descriptor, directory, size)
    entries, at = [], 0
    while at < size:
        fields = _ENTRY.unpack_from(text, at)
        crc, packed, plain, lengths, offset = fields[7], fields[8], fields[9], fields[10:13], fields[16]
        name_at = at + _ENTRY.size
        name = text[name_at : name_at + lengths[0]]
        extra = text[name_at + lengths[0] : name_at + lengths[0] + lengths[1]]
        plain, packed, offset = _wide(extra, (plain, packed, offset))
        at = name_at + sum(lengths)
        if fields[0] != b"PK\x01\x02" or at > size:
            raise NotAnArchive(stop)
        begin = _data_start(descriptor, start + offset, name)
        if begin is None or begin + packed > directory:
            raise NotAnArchive(stop)
        if fields[4] == 0:
            entries.append(StoredEntry(begin, begin + plain, crc))
    return start, entries


def _directory(descriptor: int, stop: int) -> tuple[int, int, int]:
    """Return first byte and size of the archive's directory, and first byte of the archive, all in the file."""
    at = stop - _END.size
    if at < 0:
        raise NotAnArchive(stop)
    end = _END.unpack(_read(descriptor, at, _END.size))
    size, offset = end[5], end[6]
    locator_at = at - _LOCATOR.size
    if locator_at >= _END64.size and _read(descriptor, locator_at, 4) == b"PK\x06\x07":
        at = locator_at - _END64.size
        end64 = _END64.unpack(_read(descriptor, at, _END64.size))
        if end64[0] != b"PK\x06\x06":
            raise NotAnArchive(stop)
        size, offset = end64[8], end64[9]
    if end[0] != b"PK\x05\x06" or end[7] != 0 or size + offset > at:
        raise NotAnArchive(stop)
    return at - size, size, at - size - offset


def _data_start(descriptor: int, at: int, name: bytes) -> int | None:
    """Return the first data byte of the entry with its local header at ``at``; ``None`` if there is another header."""
    header = _LOCAL.unpack(_read(descriptor, at, _LOCAL.size))
    begin = at + _LOCAL.size
    if header[0] != b"PK\x03\x04" or _read(descriptor, begin, header[9]) != name:
        return None
    return begin + header[9] + header[10]


def _wide(extra: bytes, values: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return uncompressed size, compressed size and offset; those that do not fit 32 bits are in the zip64 field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            given = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            plain, packed, offset = (next(given, value) if value == _FULL else value for value in values)
            return plain, packed, offset
        at += 4 + length
    return values


def _read(descriptor: int, start: int, size: int) -> bytes:
    return os.pread(descriptor, size, start)
