"""The zip archives that ``torch.save`` writes: their directories, records, pickles and CRC-32 checksums. No torch.

Records are uncompressed, so the file contains a tensor's bytes as they were in memory. A ``.bin`` or ``.pt`` file is
one archive; a ``.distcp`` file of DCP is a sequence of archives. The directory is at the end of an archive:
https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hf_fsdp_plugin.checkpoint.errors import refuse
from hf_fsdp_plugin.checkpoint.formats.boxes import dtype_size, element_span
from hf_fsdp_plugin.checkpoint.formats.pickles import PickledTensor, read_pickle
from hf_fsdp_plugin.checkpoint.io import file_blocks, open_for_reading
from hf_fsdp_plugin.checkpoint.names import ENTRY_ALIGNMENT

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
    """An entry of an archive: its data are the bytes ``[start, stop)``. ``crc`` is 0 if the writer computed none."""

    name: bytes
    start: int
    stop: int
    packed_size: int
    crc: int
    compressed: bool

    @property
    def record(self) -> str:
        """The name without the folder inside the archive: ``data.pkl``, ``data/0``."""
        return self.name.decode("utf-8", "replace").partition("/")[2]


def read_archive(read: Read, stop: int) -> tuple[int, list[ZipEntry]]:
    """Return the offset of the archive that ends at ``stop``, and its entries.

    Raises:
        ZipError, struct.error: there is no complete archive.
        OverflowError: an offset is outside of the file.
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
    directory, archive = at - size, at - size - offset
    data, entries = read(directory, size), []
    at = 0
    while at < len(data):
        fields = _ENTRY.unpack_from(data, at)
        name_at = at + _ENTRY.size
        extra_at = name_at + fields[10]
        at = extra_at + fields[11] + fields[12]
        if fields[0] != b"PK\1\2" or at > len(data):
            raise ZipError("its directory is damaged")
        name, extra = data[name_at:extra_at], data[extra_at : extra_at + fields[11]]
        num_bytes, packed_size, header = _wide(extra, (fields[9], fields[8], fields[16]))
        local = read(archive + header, _LOCAL.size + len(name))
        local_fields = _LOCAL.unpack(local[: _LOCAL.size])
        if local_fields[0] != b"PK\3\4" or local[_LOCAL.size :] != name:
            raise ZipError(f"no entry {name.decode('utf-8', 'replace')!r} begins at byte {archive + header:,}")
        start = archive + header + _LOCAL.size + local_fields[9] + local_fields[10]
        if start + packed_size > directory:
            raise ZipError(f"its entry {name.decode('utf-8', 'replace')!r} ends after the start of its directory")
        entries.append(ZipEntry(name, start, start + num_bytes, packed_size, fields[7], fields[4] != 0))
    return archive, entries


def _wide(extra: bytes, values: tuple[int, ...]) -> tuple[int, ...]:
    """Return the values. Values of more than 32 bits are read from the zip64 field, which contains no other values."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            return tuple(next(wide, value) if value == _MAX32 else value for value in values)
        at += 4 + length
    return values


_EDGE = 2048
"""Bytes read at once from each end of a zip. They contain all headers of a zip with one tensor."""


class TorchZip:
    """The records of a zip in the bytes ``[start, start + length)`` of an open file.

    Record names do not include the folder inside the zip: ``data.pkl``, ``data/0``.

    Raises:
        CheckpointError: from every method, if the zip is truncated, compressed or damaged.
    """

    def __init__(self, descriptor: int, start: int, length: int, place: Path | str) -> None:
        self._descriptor, self._start, self._length, self._place = descriptor, start, length, place
        self._edges = [(at, os.pread(descriptor, _EDGE, start + at)) for at in (0, max(0, length - _EDGE))]
        if self._edges[0][1][:1] == b"\x80":
            fix = "Load it with torch and save it again."
            refuse("FSDP-E460", place, "is in the format of torch versions before 1.6, without a zip.", fix)
        try:
            archive, self._entries = read_archive(self._bytes, length)
        except (ZipError, struct.error) as error:
            self._damaged(f"{error}")
        if archive != 0:
            self._damaged("its directory is not at the recorded offset")
        for entry in self._entries:
            if entry.compressed or entry.stop - entry.start != entry.packed_size:
                self._damaged(f"record {entry.record!r} is compressed or invalid")
        self._records = {entry.record: entry for entry in self._entries}
        if "byteorder" in self._records and self.read("byteorder") != b"little":
            refuse("FSDP-E460", place, "is big-endian.", "Load and save it on a little-endian machine.")

    def read(self, name: str) -> bytes:
        """Return a record's bytes."""
        entry = self._record(name)
        return self._bytes(entry.start, entry.packed_size)

    def pickles(self) -> list[bytes]:
        """Return the bytes of all pickles. torch finds its pickle in letters of any case."""
        found = [entry for entry in self._entries if entry.name.lower().endswith(b".pkl")]
        return [self._bytes(entry.start, entry.packed_size) for entry in found]

    def offset(self, name: str) -> int:
        """Return the byte offset of a record's data in the file."""
        return self._start + self._record(name).start

    def value(self) -> Any:
        """Return the object that was saved, with a :class:`PickledTensor` for each tensor."""
        return read_pickle(self.read("data.pkl"), self._place)

    def tensor_offset(self, tensor: PickledTensor) -> int:
        """Return the byte offset of a tensor's first element in the file. Checks that the last one is in the record."""
        if 0 in tensor.shape:
            # torch does not write a record for an empty storage.
            return self._start
        name = f"data/{tensor.storage.key}"
        num_bytes, width = self._record(name).packed_size, dtype_size(tensor.dtype)
        needed = (tensor.offset + element_span(tensor.strides, tensor.shape)) * width
        if needed > num_bytes:
            self._damaged(f"record {name!r} has {num_bytes} bytes, and its tensor needs {needed}")
        return self.offset(name) + tensor.offset * width

    def _record(self, name: str) -> ZipEntry:
        if name not in self._records:
            self._damaged(f"it has no record {name!r}")
        return self._records[name]

    def _bytes(self, at: int, size: int) -> bytes:
        if at < 0 or at + size > self._length:
            self._damaged(f"its directory refers to bytes {at} to {at + size} of {self._length}")
        for begin, data in self._edges:
            if begin <= at and at + size <= begin + len(data):
                return data[at - begin : at - begin + size]
        return os.pread(self._descriptor, size, self._start + at)

    def _damaged(self, how: str) -> NoReturn:
        refuse("FSDP-E453", self._place, f"is damaged: {how}.")


class TensorZips:
    """A reader of zips with one tensor each. DCP writes thousands of them, so equal headers are parsed only once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], tuple[bytes, PickledTensor, int]] = {}

    def read(self, descriptor: int, start: int, length: int, place: Path | str) -> tuple[Any, int]:
        """Return the tensor (or other saved object), and the byte offset of its first element in the file."""
        end = os.pread(descriptor, END_SIZE, start + max(0, length - END_SIZE))
        known = self._known.get((length, end))
        if known is not None:
            headers, tensor, offset = known
            if os.pread(descriptor, len(headers), start) == headers:
                return tensor, start + offset
        zipped = TorchZip(descriptor, start, length, place)
        value = zipped.value()
        if not isinstance(value, PickledTensor):
            return value, start
        offset = zipped.tensor_offset(value) - start
        # Everything that describes the tensor precedes its bytes; the directory repeats it.
        self._known[length, end] = os.pread(descriptor, offset, start), value, offset
        return value, start + offset


class NotAnArchive(ValueError):
    """The bytes before ``stop`` are not a complete zip archive."""

    def __init__(self, stop: int) -> None:
        super().__init__(f"the bytes before {stop:,} are not a complete zip archive")
        self.stop = stop


def is_archive(path: Path) -> bool:
    """Whether a file has the signature of a zip archive."""
    with open_for_reading(path) as file:
        return file.read(4) == b"PK\x03\x04"


def stored_pickles(path: Path) -> list[bytes]:
    """Return the pickles in an archive that ``torch.save`` has written. Raises the errors of :class:`TorchZip`."""
    with open_for_reading(path) as file:
        return TorchZip(file.fileno(), 0, os.fstat(file.fileno()).st_size, path).pickles()


def crc_file(path: Path, start: int, stop: int) -> int:
    """Return the CRC-32 of the bytes ``[start, stop)`` of a file, or up to the end of the file if it is shorter."""
    crc = 0
    for block in file_blocks(path, start, stop):
        crc = zlib.crc32(block, crc)
    return crc


def stored_entries(path: Path) -> Iterator[ZipEntry]:
    """Yield every uncompressed entry of every archive in the file, the last archive first.

    Raises:
        NotAnArchive: some bytes of the file do not belong to a complete archive.
    """
    with open_for_reading(path) as file:

        def read(start: int, size: int) -> bytes:
            return os.pread(file.fileno(), size, start)

        stop = os.fstat(file.fileno()).st_size
        while stop > 0:
            try:
                archive, entries = read_archive(read, stop)
            except (ZipError, struct.error, OverflowError):
                raise NotAnArchive(stop) from None
            yield from (entry for entry in entries if not entry.compressed)
            stop = _end_before(read, archive)


def _end_before(read: Read, start: int) -> int:
    """Return the end of the archive before the one at ``start``: this package aligns archives, with zeros between."""
    if start % ENTRY_ALIGNMENT:
        return start
    begin = max(0, start - ENTRY_ALIGNMENT - END_SIZE + 1)
    data = read(begin, start - begin)
    end = data.rfind(END_SIGNATURE) + END_SIZE
    return begin + end if end >= END_SIZE and not any(data[end:]) else start
