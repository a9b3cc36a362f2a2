"""Finds the byte offsets of the records in the zips that ``torch.save`` writes, from the headers alone.

Records are uncompressed, so the file contains a tensor's bytes as they were in memory. The zip may be a part of a
larger file: a ``.distcp`` file of DCP is a sequence of such zips.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, NoReturn

from hf_fsdp_plugin.checkpoint.formats.element_types import dtype_size
from hf_fsdp_plugin.checkpoint.formats.errors import refuse
from hf_fsdp_plugin.checkpoint.formats.pickles import PickledTensor, read_pickle
from hf_fsdp_plugin.checkpoint.formats.zip_directory import ZipEntry, ZipError, data_offset, read_directory

_EDGE = 2048
"""Bytes read at once from each end of a zip. They contain all headers of a zip with one tensor."""
_END_SIZE = 22
"""Size in bytes of the record at the end of a zip."""


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
        try:
            begin = data_offset(self._bytes, 0, record)
        except (ZipError, struct.error) as error:
            self._damaged(f"{error}")
        if begin + record.size > self._length:
            self._damaged(f"record {name!r} ends after the end of the zip")
        return self._start + begin

    def value(self) -> Any:
        """Return the object that was saved, with a :class:`PickledTensor` for each tensor."""
        return read_pickle(self.read("data.pkl"), self._place)

    def tensor_offset(self, tensor: PickledTensor) -> int:
        """Return the byte offset of a tensor's first element in the file. Checks that the last one is in the record."""
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

    def _read_directory(self) -> dict[str, ZipEntry]:
        if self._head[:1] == b"\x80":
            fix = "Load it with torch and save it again."
            refuse("FSDP-E460", self._place, "is in the format of torch versions before 1.6, without a zip.", fix)
        try:
            archive, _, entries = read_directory(self._bytes, self._length)
        except (ZipError, struct.error) as error:
            self._damaged(f"{error}")
        if archive != 0:
            self._damaged("its directory is not at the recorded offset")
        records = {entry.name.decode("utf-8", "replace").partition("/")[2]: entry for entry in entries}
        for name, entry in records.items():
            if entry.compressed or entry.size != entry.packed_size:
                self._damaged(f"record {name!r} is compressed or invalid")
        return records

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
    """A reader of zips with one tensor each. DCP writes thousands of them, so equal headers are parsed only once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes], tuple[bytes, PickledTensor, int]] = {}

    def read(self, descriptor: int, start: int, length: int, place: Path | str) -> tuple[Any, int]:
        """Return the tensor (or other saved object), and the byte offset of its first element in the file."""
        end = os.pread(descriptor, _END_SIZE, start + max(0, length - _END_SIZE))
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
