"""The index of a sharded folder: where the chunks of its tensors are, in a size that does not grow with the ranks.

``.metadata`` of DCP lists every chunk of every rank: millions of objects that each rank would unpickle. In the index,
chunks whose files, offsets and boxes are in arithmetic progression are one record, so that a tensor of FSDP2 has a few
records for any number of ranks. ``docs/checkpoint_index.md`` is the specification. Does not import torch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hf_fsdp_plugin.checkpoint.errors import COPY_AGAIN, file_problems_inside, name_problem, raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.formats.boxes import SIZES, Box, flat_start, row_major, whole_box
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import PieceTable, StatePath, StoredPiece, TiedPaths
from hf_fsdp_plugin.checkpoint.io import hash_bytes, parse_json, read_file
from hf_fsdp_plugin.checkpoint.names import INDEX_FILE

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT = "hf_fsdp_plugin index"
VERSION = 1
_PREFIX = struct.Struct("<8sQ16s")
"""Magic bytes, and length and hash of the header."""
_MAGIC = b"FSDPIDX1"
METADATA_TAIL = 128
"""Number of bytes at the end of ``.metadata`` that are compared. They contain the id of the save."""
_LARGEST = 1 << 56
_LARGEST_STEP = 1 << 42
"""Limits of a record's numbers, below which the arithmetic of int64 does not overflow."""


class IndexedTensor(NamedTuple):
    """A tensor, its records, and their hash."""

    path: StatePath
    dtype: str
    shape: tuple[int, ...]
    records: memoryview
    digest: str


class ArchivePlace(NamedTuple):
    """The bytes of a file that contain the archive of one entry."""

    file: str
    start: int
    length: int


def pack_segments(places: NDArray[Any], sizes: NDArray[Any]) -> NDArray[Any]:
    """Return the records of a tensor's chunks.

    Args:
        places: int64, a row for each chunk: number of the file, byte offset of its first element in the file, and its
            offsets in each dim of the tensor.
        sizes: int64, a row for each chunk: its sizes.

    Returns:
        A row for each progression: number of chunks, first place, sizes, and the step between places.
    """
    import numpy

    num_chunks = len(places)
    steps = numpy.diff(places, axis=0)
    breaks = numpy.ones(num_chunks, dtype=bool)
    # Within a progression, each step leads to a later file, and never backwards in the tensor.
    breaks[1:] = (sizes[1:] != sizes[:-1]).any(axis=1) | (steps[:, 0] <= 0) | (steps[:, 2:] < 0).any(axis=1)
    breaks[2:] |= (steps[1:] != steps[:-1]).any(axis=1)
    starts = numpy.flatnonzero(breaks)
    counts = numpy.diff(numpy.append(starts, num_chunks))
    taken = numpy.zeros((len(starts), places.shape[1]), dtype=numpy.int64)
    longer = counts > 1
    taken[longer] = steps[starts[longer]]
    return numpy.concatenate([counts[:, None], places[starts], sizes[starts], taken], axis=1)


def index_bytes(
    tensors: Sequence[tuple[StatePath, str, Sequence[int], NDArray[Any]]],
    values: Sequence[tuple[StatePath, int, int, int]],
    aliases: TiedPaths,
    files: Sequence[str],
    metadata: tuple[int, str],
) -> bytes:
    """Return the bytes of an index.

    Args:
        tensors: path, dtype, shape and records of each tensor.
        values: path, number of the file, first byte and number of bytes of each small entry.
        aliases: the other names of tied tensors.
        files: the names of the files, relative to the folder.
        metadata: size and last bytes (in hexadecimal) of the ``.metadata`` to which the index belongs.
    """
    packed, listed, first = [], [], 0
    for path, dtype, shape, segments in tensors:
        data = segments.astype("<i8").tobytes()
        packed.append(data)
        listed.append([path, dtype, list(shape), first, len(segments), hash_bytes(data)])
        first += len(data)
    tree = {"format": FORMAT, "version": VERSION, "metadata": metadata, "files": files}
    tree |= {"tensors": listed, "values": values, "aliases": aliases}
    header = json.dumps(tree, separators=(",", ":")).encode()
    header += b" " * (-(_PREFIX.size + len(header)) % 8)
    return b"".join([_PREFIX.pack(_MAGIC, len(header), bytes.fromhex(hash_bytes(header))), header, *packed])


class IndexFile:
    """The index of one folder. Records are parsed when they are needed, and compared with their hash.

    Attributes:
        tensors: the tensors, and their records.
        values: path of each small entry (a scalar or another object), and its archive.
        aliases: as in :func:`index_bytes`.
        metadata: size and last bytes of ``.metadata`` when the index was written.

    Raises:
        CheckpointError: the index is damaged, or refers to files outside the folder.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        """``prefix``: path of the folder relative to the checkpoint with ``/`` at its end, or empty."""
        self._folder, self._prefix = folder, prefix
        self.path = folder / INDEX_FILE
        self._sizes: dict[int, int] = {}
        self._data = read_file(self.path)
        if len(self._data) < _PREFIX.size:
            self._damaged("it ends too early")
        magic, length, digest = _PREFIX.unpack_from(self._data)
        self._begin = _PREFIX.size + length
        if magic != _MAGIC or self._begin > len(self._data):
            self._damaged("it does not begin with a header")
        header = self._data[_PREFIX.size : self._begin]
        if hash_bytes(header) != digest.hex():
            self._damaged("its header differs from what was saved")
        try:
            self._parse(parse_json(header))
        except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
            self._damaged(f"{type(error).__name__}: {error}")
        raise_if_any([found for name in self.files if (found := name_problem(name, self.path)) is not None][:1])

    def _parse(self, tree: Any) -> None:
        if tree["format"] != FORMAT or tree["version"] != VERSION:
            raise ValueError(f"format {tree['format']!r}, version {tree['version']!r}")
        size, last = tree["metadata"]
        self.metadata = _count(size), str(last)
        self.files = tuple(str(name) for name in tree["files"])
        self.tensors = tuple(self._tensor(*entry) for entry in tree["tensors"])
        self.values = tuple(
            (_path(path), ArchivePlace(self.files[_count(file)], _count(start), _count(length)))
            for path, file, start, length in tree["values"]
        )
        self.aliases = tuple((_path(alias), _path(path)) for alias, path in tree["aliases"])
        known = {*(tensor.path for tensor in self.tensors), *(path for path, _ in self.values)}
        if unknown := [path for _, path in self.aliases if path not in known]:
            raise ValueError(f"an alias of {unknown[0]}, which it does not contain")

    def _tensor(self, path: Any, dtype: str, shape: list[int], first: int, count: int, digest: str) -> IndexedTensor:
        begin = self._begin + _count(first)
        end = begin + _count(count) * _width(len(shape)) * 8
        if dtype not in SIZES or end > len(self._data):
            raise ValueError(f"dtype {dtype!r} and records up to byte {end:,}")
        return IndexedTensor(_path(path), dtype, tuple(map(_count, shape)), memoryview(self._data)[begin:end], digest)

    def segments(self, tensor: IndexedTensor) -> NDArray[Any]:
        """Return the records of a tensor, checked."""
        import numpy

        if hash_bytes(tensor.records) != tensor.digest:
            self._damaged("its records differ from what was saved")
        rows: NDArray[Any] = numpy.frombuffer(tensor.records, "<i8").reshape(-1, _width(len(tensor.shape)))
        if not self._valid(rows, tensor.shape):
            self._damaged(f"the records of {tensor.path} are not valid")
        return rows

    def _valid(self, rows: NDArray[Any], shape: tuple[int, ...]) -> bool:
        """Whether all chunks of the records are inside the tensor and in a listed file."""
        ndim = len(shape)
        if not len(rows):
            return True
        counts, start, sizes, steps = _columns(rows, ndim)
        if abs(rows).max() > _LARGEST or abs(steps).max() > _LARGEST_STEP:
            return False
        if counts.min() < 1 or counts.max() > len(self.files) or start.min() < 0 or (ndim and sizes.min() < 1):
            return False
        if (steps[counts > 1, 0] < 1).any() or (steps[:, 2:] < 0).any():
            return False
        last = start + (counts - 1)[:, None] * steps
        if last[:, 0].max() >= len(self.files) or last[:, 1].min() < 0:
            return False
        return bool((last[:, 2:] + sizes <= list(shape)).all()) if ndim else True

    def file(self, number: int) -> str:
        """Return the path of a file relative to the checkpoint."""
        return self._prefix + self.files[number]

    def check_files(self, numbers: NDArray[Any], stops: NDArray[Any]) -> None:
        """Check that files exist, and that each contains ``stop`` bytes. Any number may be repeated."""
        import numpy

        for number in set(numbers.tolist()) - self._sizes.keys():
            name = self.files[number]
            raise_if_any(file_problems_inside(self._folder, [name], self.path))
            self._sizes[number] = (self._folder / name).stat().st_size
        sizes = numpy.zeros(len(self.files), dtype=numpy.int64)
        sizes[list(self._sizes)] = list(self._sizes.values())
        for at in numpy.flatnonzero(stops > sizes[numbers])[:1].tolist():
            message = f"has {sizes[numbers[at]]:,} bytes, but {self.path.name} refers to bytes up to {stops[at]:,}."
            refuse("FSDP-E453", self._folder / self.files[numbers[at]], message)

    def _damaged(self, how: str) -> None:
        refuse("FSDP-E453", self.path, f"is damaged: {how}.", COPY_AGAIN)


class IndexedPieces(PieceTable):
    """The pieces of a tensor, made from the records of the index when they are needed."""

    def __init__(self, index: IndexFile, tensor: IndexedTensor) -> None:
        self._index, self._tensor = index, tensor
        self._rows: NDArray[Any] | None = None

    def within(self, box: Box) -> list[StoredPiece]:
        import numpy

        files, starts, offsets, sizes = self._chunks()
        low, size = numpy.array([box.offsets, box.sizes], dtype=numpy.int64)
        is_within = ((offsets < low + size) & (offsets + sizes > low)).all(axis=1)
        chosen: dict[Box, int] = {}
        for number in numpy.flatnonzero(is_within).tolist() if box.numel else ():
            chosen.setdefault(Box(tuple(offsets[number].tolist()), tuple(sizes[number].tolist())), number)
        numbers = list(chosen.values())  # without replicas, which have the same box
        self._index.check_files(files[numbers], self._ends(starts, sizes)[numbers])
        return [
            StoredPiece(piece, self._index.file(files[number]), int(starts[number]), row_major(piece.sizes))
            for piece, number in chosen.items()
        ]

    def load(self) -> tuple[StoredPiece, ...]:
        return tuple(self.within(whole_box(self._tensor.shape)))

    def uncovered(self, shape: Sequence[int]) -> int:
        import numpy

        files, starts, offsets, sizes = self._chunks()
        self._index.check_files(files, self._ends(starts, sizes))
        everything = whole_box(shape)
        boxes = [Box(everything.offsets, tuple(found)) for found in numpy.unique(sizes, axis=0).tolist()]
        if everything.numel > _LARGEST or any(flat_start(box, shape) is None for box in boxes):
            return super().uncovered(shape)
        # All chunks are contiguous in the tensor: compute what ``boxes.count_uncovered`` does, for all chunks at once.
        begin = offsets @ numpy.array(row_major(shape), dtype=numpy.int64)
        order = numpy.argsort(begin, kind="stable")
        begin, end = begin[order], (begin + sizes.prod(axis=1))[order]
        before = numpy.concatenate([[0], numpy.maximum.accumulate(end)[:-1]]) if len(end) else end
        return everything.numel - int(numpy.maximum(end - numpy.maximum(begin, before), 0).sum())

    def files(self) -> set[str]:
        return {self._index.file(number) for number in set(self._chunks()[0].tolist())}

    def key(self) -> Hashable:
        return id(self)  # tied tensors have the same table

    def _chunks(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return the number of the file, first byte, offsets and sizes of each chunk."""
        import numpy

        if self._rows is None:
            self._rows = self._index.segments(self._tensor)
        counts, start, sizes, steps = _columns(self._rows, len(self._tensor.shape))
        record = numpy.repeat(numpy.arange(len(counts)), counts)
        number = numpy.arange(len(record)) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
        places = start[record] + number[:, None] * steps[record]
        return places[:, 0], places[:, 1], places[:, 2:], sizes[record]

    def _ends(self, starts: NDArray[Any], sizes: NDArray[Any]) -> NDArray[Any]:
        return starts + sizes.prod(axis=1) * SIZES[self._tensor.dtype]


def _width(ndim: int) -> int:
    """Return the number of int64 of a record."""
    return 1 + (2 + ndim) + ndim + (2 + ndim)


def _columns(rows: NDArray[Any], ndim: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the counts, first places, sizes and steps of records."""
    return rows[:, 0], rows[:, 1 : 3 + ndim], rows[:, 3 + ndim : 3 + 2 * ndim], rows[:, 3 + 2 * ndim :]


def _path(parts: Any) -> StatePath:
    if not isinstance(parts, list) or not parts or not all(type(part) in (str, int) for part in parts):
        raise TypeError(f"the path {parts}")
    return tuple(parts)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise ValueError(f"{value!r} is not a size")
    return value
