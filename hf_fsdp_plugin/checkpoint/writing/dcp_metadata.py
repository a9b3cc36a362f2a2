"""Writes the pickle ``.metadata`` of DCP from arrays, without an object for each chunk.

With 1,024 ranks and AdamW, ``.metadata`` describes millions of chunks. Creating and pickling torch's objects for them
takes minutes under the GIL. Here one chunk of a tensor is pickled, with placeholders instead of its numbers, and numpy
repeats its bytes with the numbers of all chunks.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from hf_fsdp_plugin.torch_private.functions import StorageInfo

StatePath = tuple[str | int, ...]
"""Path of an entry in the nested state dict: ``("optimizer", "state", "lm_head.weight", "exp_avg")``."""
_SHARED = (
    Metadata, ChunkStorageMetadata, MetadataIndex, StorageInfo, TensorStorageMetadata, TensorProperties, torch.Size,
    "offsets", "sizes", "fqn", "offset", "index", "relative_path", "length", "properties", "size", "chunks",
)  # fmt: skip
"""What the pickle of a chunk refers to: classes, and the names of attributes."""
_NARROW, _WIDE = 0x7A5A7A00, 0x7A5A7A5A7A5A7A00
"""The first placeholders, whose pickles have four and eight bytes after their instruction."""
_PART = 4 << 20
"""Minimum number of bytes of a part of the pickle."""


def flat_name(path: StatePath) -> str:
    """Return the name of an entry in ``.metadata``."""
    return ".".join(map(str, path))


class Chunks(NamedTuple):
    """The chunks of a tensor, as arrays of int64 with a row for each chunk.

    Attributes:
        places: number of its file, first byte, number of bytes, byte offset of its first element.
        offsets, sizes: the box of each chunk, with a column for each dim.
    """

    places: NDArray[Any]
    offsets: NDArray[Any]
    sizes: NDArray[Any]


class MetadataPickle:
    """The contents of ``.metadata``, in the order of a pickle.

    Args:
        files: the names of all files of the folder; chunks refer to them by number.
        save_id: identifies the save.
    """

    def __init__(self, files: Sequence[str], save_id: str) -> None:
        self._files = files
        self._save_id = save_id
        self._buffer = io.BytesIO()
        self._pickler = pickle.Pickler(self._buffer, protocol=2)
        self._num_shared = 0
        self._head: list[bytes] = [b"\x80\x02"]
        self._entries: list[bytes] = []
        self._storage: list[bytes] = []
        self._paths: list[bytes] = []
        for shared in _SHARED:
            self._share(shared)
        self._file_places = numpy.array([self._share(name) for name in files], dtype=numpy.int64)

    def add_tensor(self, path: StatePath, dtype: str, shape: Sequence[int], chunks: Chunks) -> None:
        name = self._add_name(path)
        count, ndim = chunks.sizes.shape

        def chunk(*numbers: int) -> list[Any]:
            return [ChunkStorageMetadata(torch.Size(numbers[:ndim]), torch.Size(numbers[ndim:]))]

        def place(file: Any, start: int, length: int, index: int, *offsets: int) -> list[Any]:
            return [MetadataIndex(name, offsets, index), StorageInfo(file, start, length)]

        tensor = TensorStorageMetadata(TensorProperties(dtype=getattr(torch, dtype)), torch.Size(shape), [])
        described = self._pickled(tensor)
        assert described.endswith(b"]ub"), "the empty list of chunks is the last attribute"
        rows = self._rows(count, chunk, [*chunks.offsets.T, *chunks.sizes.T])
        self._entries += [self._pickled(name), described[:-2], b"(", rows, b"eub"]
        files, starts, lengths, _ = chunks.places.T
        columns = [self._file_places[files], starts, lengths, numpy.arange(count), *chunks.offsets.T]
        self._storage += [b"(", self._rows(count, place, columns, reference=True), b"u"]

    def add_value(self, path: StatePath, file: int, start: int, length: int) -> None:
        """Add an object that is not a tensor."""
        name = self._add_name(path)
        self._entries += [self._pickled(name), self._pickled(BytesStorageMetadata())]
        key, value = MetadataIndex(name), StorageInfo(self._files[file], start, length)
        self._storage += [b"(", self._pickled(key), self._pickled(value), b"u"]

    def finished(self) -> tuple[bytes, ...]:
        """Return the bytes of the pickle, in parts of some megabytes. The last bytes contain the ``save_id``."""
        instructions = [
            *self._head, self._pickled(Metadata), b")\x81}(",  # a new object, and the dict of its attributes
            self._pickled("state_dict_metadata"), b"}(", *self._entries, b"u",
            self._pickled("planner_data"), b"}(", *self._paths, b"u",
            self._pickled("storage_data"), b"}", *self._storage,
            self._pickled("version"), self._pickled(CURRENT_DCP_VERSION),
            self._pickled("storage_meta"), self._pickled(StorageMeta(save_id=self._save_id)), b"ub.",
        ]  # fmt: skip
        parts, batch, size = [], [], 0
        for item in instructions:
            batch.append(item)
            size += len(item)
            if size >= _PART:
                parts.append(b"".join(batch))
                batch, size = [], 0
        return (*parts, b"".join(batch))

    def _add_name(self, path: StatePath) -> str:
        name = flat_name(path)
        self._share(name)
        self._paths += [self._pickled(name), self._pickled(path)]
        return name

    def _share(self, value: Any) -> int:
        """Create a name or a class at the beginning of the pickle, and return its place in the pickle's memo."""
        self._head += [self._pickled(value, fast=False), b"0"]
        self._num_shared += 1
        return self._num_shared - 1

    def _pickled(self, value: Any, *, fast: bool = True) -> bytes:
        """Return the instructions that create a value. With ``fast``, nothing is added to the memo."""
        self._pickler.fast = fast
        self._pickler.dump(value)
        data = self._buffer.getvalue()[2:-1]  # without the version and the STOP
        self._buffer.seek(0)
        self._buffer.truncate()
        return data

    def _rows(
        self, count: int, create: Callable[..., list[Any]], columns: Sequence[NDArray[Any]], *, reference: bool = False
    ) -> bytes:
        """Return the pickles of the objects that ``create`` returns for each row of numbers.

        Args:
            reference: the first number is a place in the memo, and stands for the object there.
        """
        wide = [bool(column.max(initial=0) >> 31) for column in columns]
        marks = [(_WIDE if is_wide else _NARROW) + number for number, is_wide in enumerate(wide)]
        one = b"".join(map(self._pickled, create(*marks)))
        if reference:
            mark = marks[0].to_bytes(4, "little")
            one = one.replace(pickle.BININT + mark, pickle.LONG_BINGET + mark)
        rows = numpy.tile(numpy.frombuffer(one, numpy.uint8), (count, 1))
        for mark, is_wide, column in zip(marks, wide, columns, strict=True):
            size = 8 if is_wide else 4
            at = one.index(mark.to_bytes(size, "little"))
            rows[:, at : at + size] = column.astype(f"<i{size}").reshape(-1, 1).view(numpy.uint8)
        return rows.tobytes()
