"""The zips that ``torch.save`` writes: the byte offsets of their records, from the headers alone.

Records are uncompressed, so the file contains a tensor's bytes as they were in memory. The zip may be a part of a
larger file: a ``.distcp`` file of DCP is a sequence of such zips.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hf_fsdp_plugin.checkpoint.formats.element_types import dtype_size
from hf_fsdp_plugin.checkpoint.formats.errors import refuse
from hf_fsdp_plugin.checkpoint.formats.pickles import PickledTensor, read_pickle

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL_SIZE = 30
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF

_EDGE = 2048
"""Bytes read at once from each end: they contain all headers of a zip with one tensor."""


class _Record(NamedTuple):
    header: int
    """Byte offset of its local header in the zip."""
    size: int


class TorchZip:
    """The records of a zip in the bytes ``[start, start + length)`` of an open file.

    Record names do not include the folder inside the zip: ``data.pkl``, ``data/0``.

    Raises:
        CheckpointError: from every method, if the zip is truncated, compressed or damaged.
    """

    def __init__(self, descriptor: int, start: int, length: int, place: Path | str) -> None:
        self._descriptor = descriptor
        self._start = start
        self._length = length
        self._place = place
        self._head = os.pread(descriptor, min(length, _EDGE), start)
        self._tail = os.pread(descriptor, min(length, _EDGE), start + length - min(length, _EDGE))
        self._records = self._read_directory()
        if "byteorder" in self._records and self.read("byteorder") != b"little":
            refuse("FSDP-E460", place, "is big-endian.", "Load and save it on a little-endian machine.")

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def read(self, name: str) -> bytes:
        """Return a record's bytes."""
        return self._bytes(self.offset(name) - self._start, self._records[name].size)

    def size(self, name: str) -> int:
        """Return the number of bytes of a record."""
        return self._records[name].size

    def offset(self, name: str) -> int:
        """Return the byte offset of a record's data in the file."""
        if name not in self._records:
            self._damaged(f"it has no record {name!r}")
        record = self._records[name]
        header = self._bytes(record.header, _LOCAL_SIZE)
        if header[:4] != b"PK\3\4":
            self._damaged(f"no record begins at byte {record.header}")
        begin = record.header + _LOCAL_SIZE + sum(struct.unpack_from("<2H", header, 26))
        if begin + record.size > self._length:
            self._damaged(f"record {name!r} ends after the end of the zip")
        return self._start + begin

    def value(self) -> Any:
        """Return the object that was saved, with a :class:`PickledTensor` for each tensor."""
        return read_pickle(self.read("data.pkl"), self._place)

    def tensor_offset(self, tensor: PickledTensor) -> int:
        """Return the byte offset of a tensor's first element in the file. Checks that its last one is in the record."""
        if 0 in tensor.shape:
            # torch does not write a record for an empty storage.
            return self._start
        name = f"data/{tensor.storage.key}"
        begin = self.offset(name)
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
        width = dtype_size(tensor.dtype)
        needed = (tensor.offset + reach + 1) * width
        if needed > self.size(name):
            self._damaged(f"record {name!r} has {self.size(name)} bytes, and its tensor needs {needed}")
        return begin + tensor.offset * width

    def _read_directory(self) -> dict[str, _Record]:
        begin, size, count = self._directory_place()
        data = self._bytes(begin, size)
        records: dict[str, _Record] = {}
        at = 0
        for _ in range(count):
            if at + _ENTRY.size > size:
                self._damaged("its directory ends early")
            entry = _ENTRY.unpack_from(data, at)
            method, stored, plain, name_size, extra_size, comment_size, header = *entry[4:5], *entry[8:13], entry[16]
            at += _ENTRY.size
            name = data[at : at + name_size].decode("utf-8", "replace").partition("/")[2]
            if _MAX32 in (plain, stored, header):
                plain, stored, header = self._wide(data[at + name_size :][:extra_size], plain, stored, header)
            if entry[0] != b"PK\1\2" or method != 0 or stored != plain:
                self._damaged(f"record {name!r} is compressed or invalid")
            records[name] = _Record(header, plain)
            at += name_size + extra_size + comment_size
        return records

    def _directory_place(self) -> tuple[int, int, int]:
        """Return offset, size and number of entries of the directory at the end of the zip."""
        at = self._length - _END.size
        end = _END.unpack(self._bytes(at, _END.size)) if at >= 0 else (b"",)
        if end[0] != b"PK\5\6":
            legacy = self._head[:1] == b"\x80"
            if legacy:
                fix = "Load it with torch and save it again."
                refuse("FSDP-E460", self._place, "is in the format of torch versions before 1.6, without a zip.", fix)
            refuse("FSDP-E453", self._place, "is truncated, or not a zip.")
        count, size, begin = end[4:7]
        if count == _MAX16 or _MAX32 in (size, begin):
            locator = _END64_LOCATOR.unpack(self._bytes(at - _END64_LOCATOR.size, _END64_LOCATOR.size))
            wide = _END64.unpack(self._bytes(locator[2], _END64.size))
            if locator[0] != b"PK\6\7" or wide[0] != b"PK\6\6":
                self._damaged("its directory is not at the recorded offset")
            count, size, begin = wide[7:10]
        return begin, size, count

    def _wide(self, extra: bytes, *fields: int) -> list[int]:
        """Return the fields, with those of 4 GiB and more from the zip64 field, which contains no others."""
        at = 0
        while at + 4 <= len(extra):
            kind, size = struct.unpack_from("<2H", extra, at)
            if kind == 1 and at + 4 + size <= len(extra):
                numbers = iter(struct.unpack_from(f"<{size // 8}Q", extra, at + 4))
                return [next(numbers, _MAX32) if field == _MAX32 else field for field in fields]
            at += 4 + size
        self._damaged("the zip64 field of a record is missing")

    def _bytes(self, at: int, size: int) -> bytes:
        if at < 0 or at + size > self._length:
            self._damaged(f"its directory refers to bytes {at} to {at + size} of {self._length}")
        if at + size <= len(self._head):
            return self._head[at : at + size]
        before_tail = self._length - len(self._tail)
        if at >= before_tail:
            return self._tail[at - before_tail :][:size]
        return os.pread(self._descriptor, size, self._start + at)

    def _damaged(self, how: str) -> NoReturn:
        refuse("FSDP-E453", self._place, f"is damaged: {how}.")


class TensorZips:
    """A reader of zips with one tensor each, of which DCP writes thousands: equal headers are parsed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], tuple[bytes, PickledTensor, int]] = {}

    def read(self, descriptor: int, start: int, length: int, place: Path | str) -> tuple[Any, int]:
        """Return the tensor (or other saved object), and the byte offset of its first element in the file."""
        end = os.pread(descriptor, _END.size, start + max(0, length - _END.size))
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
