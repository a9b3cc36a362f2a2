"""Reads the directories of the zip archives that ``torch.save`` writes. Their entries are not compressed.

A ``.bin`` or ``.pt`` file is one archive; a ``.distcp`` file of DCP is a sequence of archives. The directory is at the
end of an archive: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

_END = struct.Struct("<4s4H2LH")
END_SIZE = _END.size
"""Size in bytes of the record at the end of an archive."""
END_SIGNATURE = b"PK\5\6"
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_LOCATOR_SIZE = 20
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX32 = 0xFFFFFFFF
"""A 32-bit field contains this number if its value is in the zip64 field."""

Read = Callable[[int, int], bytes]
"""(byte offset, number of bytes) -> bytes; fewer bytes if the file is shorter."""


class ZipError(Exception):
    """The bytes are not a complete zip archive."""


class ZipEntry(NamedTuple):
    """An entry of the directory; its header is at the byte offset ``header`` in the archive."""

    name: bytes
    header: int
    size: int
    packed_size: int
    crc: int
    compressed: bool


def read_directory(read: Read, stop: int) -> tuple[int, int, list[ZipEntry]]:
    """Return the entries of the archive that ends at ``stop``, after the offsets of the archive and of its directory.

    Raises:
        ZipError, struct.error: there is no complete archive.
    """
    at = stop - _END.size
    if at < 0:
        raise ZipError("it has fewer bytes than an archive")
    end = _END.unpack(read(at, _END.size))
    size, offset = end[5:7]
    locator = at - _END64_LOCATOR_SIZE
    if locator >= _END64.size and read(locator, 4) == b"PK\6\7":
        at = locator - _END64.size
        end64 = _END64.unpack(read(at, _END64.size))
        if end64[0] != b"PK\6\6":
            raise ZipError("its zip64 directory is not at the recorded offset")
        size, offset = end64[8:10]
    if end[0] != END_SIGNATURE or end[7] != 0:
        raise ZipError("it does not end with the directory of an archive")
    if size + offset > at:
        raise ZipError("its directory is not at the recorded offset")
    return at - size - offset, at - size, _entries(read(at - size, size))


def data_offset(read: Read, archive: int, entry: ZipEntry) -> int:
    """Return the byte offset of an entry's data, which follow its local header.

    Raises:
        ZipError, struct.error: the header is missing, or belongs to another entry.
    """
    header = archive + entry.header
    data = read(header, _LOCAL.size + len(entry.name))
    fields = _LOCAL.unpack(data[: _LOCAL.size])
    if fields[0] != b"PK\3\4" or data[_LOCAL.size :] != entry.name:
        raise ZipError(f"no entry {entry.name.decode('utf-8', 'replace')!r} begins at byte {header:,}")
    return header + _LOCAL.size + fields[9] + fields[10]


def _entries(data: bytes) -> list[ZipEntry]:
    entries = []
    at = 0
    while at < len(data):
        fields = _ENTRY.unpack_from(data, at)
        name_at = at + _ENTRY.size
        extra_at = name_at + fields[10]
        at = extra_at + fields[11] + fields[12]
        if fields[0] != b"PK\1\2" or at > len(data):
            raise ZipError("its directory is damaged")
        extra = data[extra_at : extra_at + fields[11]]
        size, packed_size, header = _wide(extra, (fields[9], fields[8], fields[16]))
        entries.append(ZipEntry(data[name_at:extra_at], header, size, packed_size, fields[7], fields[4] != 0))
    return entries


def _wide(extra: bytes, values: tuple[int, ...]) -> tuple[int, ...]:
    """Return the values, with those of more than 32 bits read from the zip64 field. It contains no other values."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            return tuple(next(wide, value) if value == _MAX32 else value for value in values)
        at += 4 + length
    return values
