"""The CRC-32 checksums of the zip archives that ``torch.save`` writes."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_fsdp_plugin.checkpoint.formats.zip_directory import (
    END_SIGNATURE,
    END_SIZE,
    Read,
    ZipError,
    data_offset,
    read_directory,
)
from hf_fsdp_plugin.checkpoint.io import reading
from hf_fsdp_plugin.checkpoint.names import ENTRY_ALIGNMENT

_BLOCK = 1 << 20


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
    with reading(path) as file:
        return file.read(4) == b"PK\x03\x04"


def stored_pickles(path: Path) -> list[bytes]:
    """Return the pickles in an archive that ``torch.save`` has written.

    Raises:
        ZipError, struct.error, OverflowError: an entry is compressed, so it could fill the memory, or the archive
            cannot be read.
    """
    with reading(path) as file:
        end = os.fstat(file.fileno()).st_size

        def read(start: int, size: int) -> bytes:
            if start + size > end:
                raise ZipError("an entry ends after the end of the archive")
            return os.pread(file.fileno(), size, start)

        archive, _, entries = read_directory(read, end)
        if any(entry.compressed or entry.size != entry.packed_size for entry in entries):
            raise ZipError("it has compressed entries, which torch does not write")
        # torch finds its pickle in letters of any case.
        found = [entry for entry in entries if entry.name.lower().endswith(b".pkl")]
        return [read(data_offset(read, archive, entry), entry.size) for entry in found]


def crc_file(path: Path, start: int, stop: int) -> int:
    """Return the CRC-32 of the bytes ``[start, stop)`` of a file, or up to the end of the file if it is shorter."""
    crc = 0
    with reading(path) as file:
        while start < stop and (block := os.pread(file.fileno(), min(_BLOCK, stop - start), start)):
            crc = zlib.crc32(block, crc)
            start += len(block)
    return crc


def stored_entries(path: Path) -> Iterator[StoredEntry]:
    """Yield every uncompressed entry of every archive in the file, the last archive first.

    Raises:
        NotAnArchive: some bytes of the file do not belong to a complete archive.
    """
    with reading(path) as file:

        def read(start: int, size: int) -> bytes:
            return os.pread(file.fileno(), size, start)

        stop = os.fstat(file.fileno()).st_size
        while stop > 0:
            try:
                archive, directory, entries = read_directory(read, stop)
                starts = [data_offset(read, archive, entry) for entry in entries]
            except (ZipError, struct.error, OverflowError):  # OverflowError: an offset outside the file
                raise NotAnArchive(stop) from None
            for start, entry in zip(starts, entries, strict=True):
                if start + entry.packed_size > directory:
                    raise NotAnArchive(stop)
                if not entry.compressed:
                    yield StoredEntry(start, start + entry.size, entry.crc)
            stop = _end_before(read, archive)


def _end_before(read: Read, start: int) -> int:
    """Return the end of the archive before the one at ``start``: this package aligns archives, with zeros between."""
    if start % ENTRY_ALIGNMENT:
        return start
    begin = max(0, start - ENTRY_ALIGNMENT - END_SIZE + 1)
    data = read(begin, start - begin)
    end = data.rfind(END_SIGNATURE) + END_SIZE
    return begin + end if end >= END_SIZE and not any(data[end:]) else start
