"""Writes the pickle ``.metadata`` of DCP from arrays, without an object for each chunk.

With 1,024 ranks and AdamW, ``.metadata`` describes millions of chunks. Creating and pickling torch's objects for them
takes minutes under the GIL. Here numpy assembles the instructions of the pickle, a tensor at a time: those of a
tensor's chunks differ in a few numbers only.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterable, Sequence
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
_POP, _NEW, _TUPLE = b"0", b")\x81}(", {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}
"""``_NEW`` creates an object of the class on the stack without arguments, and begins the dict of its attributes."""
_MANY = 64
_PART = 4 << 20
"""Minimum number of bytes of a part of the pickle."""
_BUILD = b"ub"
"""Ends the dict, and sets the attributes of the object."""


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
        self._memo: dict[object, int] = {}
        self._next = 0
        self._files = files
        self._save_id = save_id
        self._head: list[bytes] = [b"\x80\x02"]
        self._entries: list[bytes] = []
        self._storage: list[bytes] = []
        self._paths: list[bytes] = []
        for kind in (ChunkStorageMetadata, MetadataIndex, StorageInfo, TensorStorageMetadata, torch.Size):
            self._keep(kind, _fragment(kind))
        for text in ("offsets", "sizes", "fqn", "offset", "index", "relative_path", "length"):
            self._keep(text, _fragment(text))
        self._file_places = numpy.array([self._keep(("file", name), _fragment(name)) for name in files], dtype="<u4")
        self._objects: dict[str, tuple[int, NDArray[Any]]] = {}

    def add_tensor(self, path: StatePath, dtype: str, shape: Sequence[int], chunks: Chunks) -> None:
        name = self._name(path)
        of_sizes = self._places_of_sizes(chunks.sizes)
        of_offsets = self._reserve(len(chunks.places))
        whole = self._reserve(1)
        self._entries += [
            self._get(("name", name)), self._get(TensorStorageMetadata), b")\x81", _put(int(whole[0])), b"}(",
            _fragment("properties"), _fragment(TensorProperties(dtype=getattr(torch, dtype))),
            _fragment("size"), self._size(shape), _fragment("chunks"), b"](",
        ]  # fmt: skip
        # ChunkStorageMetadata: its offsets are put into the memo, because the keys of the files' ranges repeat them.
        row = [
            self._get(ChunkStorageMetadata), _NEW, self._get("offsets"), self._get(torch.Size), *_tuple(chunks.offsets),
            _TUPLE[1], b"Rr", of_offsets, self._get("sizes"), b"j", of_sizes, _BUILD,
        ]  # fmt: skip
        self._entries += [_rows(len(chunks.places), row), b"e", _BUILD]
        self._objects[name] = int(whole[0]), of_offsets
        self._storage.append(self._ranges(name, of_offsets, chunks))

    def add_alias(self, alias: StatePath, path: StatePath, chunks: Chunks) -> None:
        """Add another name of a tensor that was added with these chunks."""
        name = self._name(alias)
        whole, of_offsets = self._objects[flat_name(path)]
        self._entries += [self._get(("name", name)), b"j", struct.pack("<I", whole)]
        self._storage.append(self._ranges(name, of_offsets, chunks))

    def add_value(self, path: StatePath, file: int, start: int, length: int) -> None:
        """Add an object that is not a tensor."""
        name = self._name(path)
        self._entries += [self._get(("name", name)), _fragment(BytesStorageMetadata())]
        key, value = MetadataIndex(name), StorageInfo(self._files[file], start, length)
        self._storage.append(b"(" + _fragment(key) + _fragment(value) + b"u")

    def finished(self) -> tuple[bytes, ...]:
        """Return the bytes of the pickle, in parts of some megabytes. The last bytes contain the ``save_id``."""
        instructions = [
            *self._head, _fragment(Metadata), _NEW,
            _fragment("state_dict_metadata"), b"}(", *self._entries, b"u",
            _fragment("planner_data"), b"}(", *self._paths, b"u",
            _fragment("storage_data"), b"}", *self._storage,
            _fragment("version"), _fragment(CURRENT_DCP_VERSION),
            _fragment("storage_meta"), _fragment(StorageMeta(save_id=self._save_id)), _BUILD, b".",
        ]  # fmt: skip
        parts, batch, size = [], [], 0
        for item in instructions:
            batch.append(item)
            size += len(item)
            if size >= _PART:
                parts.append(b"".join(batch))
                batch, size = [], 0
        return (*parts, b"".join(batch))

    def _ranges(self, name: str, of_offsets: NDArray[Any], chunks: Chunks) -> bytes:
        """Return the items of ``storage_data``: MetadataIndex -> _StorageInfo."""
        count = len(chunks.places)
        files, starts, lengths, _ = (numpy.ascontiguousarray(column, dtype="<i8") for column in chunks.places.T)
        parts: list[bytes | NDArray[Any]] = [
            self._get(MetadataIndex), _NEW, self._get("fqn"), self._get(("name", name)),
            self._get("offset"), b"j", of_offsets, self._get("index"), b"J", numpy.arange(count, dtype="<i4"), _BUILD,
            self._get(StorageInfo), _NEW, self._get("relative_path"), b"j", self._file_places[files],
            self._get("offset"), b"\x8a\x08", starts, self._get("length"), b"\x8a\x08", lengths,
            _BUILD,
        ]  # fmt: skip
        return b"(" + _rows(count, parts) + b"u"

    def _name(self, path: StatePath) -> str:
        name = flat_name(path)
        self._keep(("name", name), _fragment(name))
        self._paths += [self._get(("name", name)), _fragment(path)]
        return name

    def _places_of_sizes(self, sizes: NDArray[Any]) -> NDArray[Any]:
        """Add the sizes of chunks to the memo, and return their places. Most chunks of a tensor have equal sizes."""
        changes = numpy.ones(len(sizes), dtype=bool)
        changes[1:] = (sizes[1:] != sizes[:-1]).any(axis=1)
        distinct, which = sizes[changes], numpy.cumsum(changes) - 1
        if len(distinct) > _MANY:
            distinct, which = numpy.unique(sizes, axis=0, return_inverse=True)
        places = [self._keep(None, self._size(row)) for row in distinct.tolist()]
        return numpy.array(places, dtype="<u4")[which.reshape(-1)]

    def _size(self, shape: Sequence[int]) -> bytes:
        return self._get(torch.Size) + _fragment(tuple(int(size) for size in shape)) + _TUPLE[1] + b"R"

    def _reserve(self, count: int) -> NDArray[Any]:
        found = numpy.arange(self._next, self._next + count, dtype="<u4")
        self._next += count
        return found

    def _keep(self, key: object, instructions: bytes) -> int:
        """Add an object to the memo at the beginning of the pickle, and return its place."""
        (place,) = self._reserve(1).tolist()
        self._head += [instructions, _put(place), _POP]
        if key is not None:
            self._memo[key] = place
        return int(place)

    def _get(self, key: object) -> bytes:
        return b"j" + struct.pack("<I", self._memo[key])


def _put(place: int) -> bytes:
    return b"r" + struct.pack("<I", place)


def _fragment(value: Any) -> bytes:
    """Return the instructions that create a value. They do not use the memo, so that they can be a part of a pickle."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=2)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]  # without the version and the STOP


def _tuple(numbers: NDArray[Any]) -> list[bytes | NDArray[Any]]:
    """Return the parts of rows that create a tuple of the numbers of each row."""
    ndim = numbers.shape[1]
    small = not numbers.size or int(numbers.max()) < 1 << 31
    parts: list[bytes | NDArray[Any]] = [] if ndim in _TUPLE else [b"("]
    for dim in range(ndim):
        column = numpy.ascontiguousarray(numbers[:, dim], dtype="<i4" if small else "<i8")
        parts += [b"J" if small else b"\x8a\x08", column]
    return [*parts, _TUPLE.get(ndim, b"t")]


def _rows(count: int, parts: Iterable[bytes | NDArray[Any]]) -> bytes:
    """Return ``count`` rows of bytes: the same bytes in each row, and the number of each row from arrays."""
    parts = list(parts)
    widths = [len(part) if isinstance(part, bytes) else part.dtype.itemsize for part in parts]
    rows = numpy.empty((count, sum(widths)), dtype=numpy.uint8)
    at = 0
    for part, width in zip(parts, widths, strict=True):
        values = numpy.frombuffer(part, numpy.uint8) if isinstance(part, bytes) else part.reshape(-1, 1).view("u1")
        rows[:, at : at + width] = values
        at += width
    return rows.tobytes()
