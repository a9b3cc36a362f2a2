"""What the ranks write to a folder, as arrays: the chunks of each rank, and those of all ranks joined by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

StatePath = tuple[str | int, ...]
"""Path of an entry in the nested state dict: ``("optimizer", "state", "lm_head.weight", "exp_avg")``."""
Tensor = tuple[StatePath, str, tuple[int, ...]]
"""Path, dtype and global shape."""
_FIXED = 4


@dataclass(frozen=True, slots=True)
class SmallEntry:
    """A scalar tensor (``data`` is its bytes), or any other object (``data`` is pickled, ``dtype`` is ``None``)."""

    path: StatePath
    data: bytes
    dtype: str | None = None
    shape: tuple[int, ...] = ()


@dataclass(slots=True)
class FolderEntries:
    """The entries that one rank adds to one folder.

    Attributes:
        folder: path relative to the checkpoint.
        file: name of this rank's file in it.
        tensors: the tensors of which the file contains chunks. Ranks with equal tensors may share one sequence.
        chunks: int64, a row for each chunk: number of the tensor, first byte and number of bytes of the entry, byte
            offset of the chunk's first element, offsets, sizes. Unused dims are 0.
        smalls: entries that are not in this rank's file: rank 0 writes them when it commits.
        aliases: (path of a tied name, path of the entry that holds its tensor).
    """

    folder: str
    file: str
    tensors: Sequence[Tensor]
    chunks: NDArray[Any]
    smalls: Sequence[SmallEntry] = ()
    aliases: Sequence[tuple[StatePath, StatePath]] = ()


def flat_name(path: StatePath) -> str:
    """Return the name of an entry in ``.metadata``."""
    return ".".join(map(str, path))


def chunk_table(chunks: Sequence[tuple[int, int, int, int, Sequence[int], Sequence[int]]]) -> NDArray[Any]:
    """Return the rows of :attr:`FolderEntries.chunks` from tuples of their columns."""
    ndim = max((len(offsets) for *_, offsets, _ in chunks), default=0)
    table = numpy.zeros((len(chunks), _FIXED + 2 * ndim), dtype=numpy.int64)
    for row, (*fixed, offsets, sizes) in zip(table, chunks, strict=True):
        row[:_FIXED] = fixed
        row[_FIXED : _FIXED + len(offsets)] = offsets
        row[_FIXED + ndim : _FIXED + ndim + len(sizes)] = sizes
    return table


class JoinedChunks:
    """The chunks of all ranks, by tensor, in the order of the ranks.

    No loop over chunks: with 1,024 ranks there are millions.
    """

    def __init__(self, ranks: Sequence[FolderEntries]) -> None:
        self.tensors: list[Tensor] = []
        numbers: dict[StatePath, int] = {}
        of_rank: dict[int, NDArray[Any]] = {}  # the ranks' sequences are alive, so that their ids are distinct
        for entries in ranks:
            if id(entries.tensors) not in of_rank:
                for tensor in entries.tensors:
                    if numbers.setdefault(tensor[0], len(self.tensors)) == len(self.tensors):
                        self.tensors.append(tensor)
                of_rank[id(entries.tensors)] = numpy.array(
                    [numbers[path] for path, _, _ in entries.tensors], dtype="i8"
                )
        self.numbers = numbers
        self._ndim = max((len(shape) for _, _, shape in self.tensors), default=0)
        total = sum(len(entries.chunks) for entries in ranks)
        rows = numpy.zeros((total, _FIXED + 2 * self._ndim), dtype=numpy.int64)
        tensors = numpy.zeros(total, dtype=numpy.int64)
        at = 0
        for rank, entries in enumerate(ranks):
            table, stop = entries.chunks, at + len(entries.chunks)
            ndim = (table.shape[1] - _FIXED) // 2
            if at < stop:
                tensors[at:stop] = of_rank[id(entries.tensors)][table[:, 0]]
            rows[at:stop, 0] = rank
            rows[at:stop, 1:_FIXED] = table[:, 1:_FIXED]
            rows[at:stop, _FIXED : _FIXED + ndim] = table[:, _FIXED : _FIXED + ndim]
            rows[at:stop, _FIXED + self._ndim : _FIXED + self._ndim + ndim] = table[:, _FIXED + ndim :]
            at = stop
        self._rows = rows
        self._order = numpy.argsort(tensors, kind="stable")
        self._starts = numpy.searchsorted(tensors[self._order], numpy.arange(len(self.tensors) + 1))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[Tensor, NDArray[Any]]]:
        """Yield each tensor with its chunks: rank, first byte, number of bytes, first element, offsets, sizes."""
        for number, tensor in enumerate(self.tensors):
            yield tensor, self.of(number)

    def of(self, number: int) -> NDArray[Any]:
        """Return the chunks of the tensor ``tensors[number]``."""
        ndim = len(self.tensors[number][2])
        rows = self._rows.take(self._order[self._starts[number] : self._starts[number + 1]], axis=0)
        sizes = _FIXED + self._ndim
        return numpy.concatenate([rows[:, : _FIXED + ndim], rows[:, sizes : sizes + ndim]], axis=1)
