"""Where the tensors of a checkpoint are stored: names, boxes, files and byte offsets, in the same form for all formats.

The readers of the formats read headers and metadata only. :func:`read_run` reads the elements, with the file, byte
offset and strides that are recorded here.

The state tensors of an optimizer have one of three layouts. :func:`state_layout` decides by the shapes of a state
tensor and its parameter:

``like_parameter``: sharded like its parameter. Loaded with any number of ranks.
``scalar``: one number that is equal on all ranks.
``other``: any other shape. How it is stored depends on the optimizer. If it steps on whole parameters (Adafactor's rows
and columns under FSDP2), the state is whole and equal on all ranks, and loaded with any number of ranks. Else it
belongs to the elements of one shard, such as the codes and scales of 8-bit optimizers: the key contains the range of
these elements, as in ``absmax1@0+2048``, and only a rank with the same elements can load it. A tensor subclass
(torchao's quantized state) is stored as its inner tensors: ``exp_avg.codes@0+2048``.

To support state with another layout, add it here, and its case in ``shards.py``, ``reading/optimizer.py`` and
``checking/verify.py``.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hf_fsdp_plugin.checkpoint.errors import COPY_AGAIN
from hf_fsdp_plugin.checkpoint.formats import boxes
from hf_fsdp_plugin.checkpoint.io import MAX_SPAN, InputFiles
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.spec.fsdp_spec import StateDictKind
from hf_fsdp_plugin.text import plural

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_PROBLEMS = 8
"""Maximum number of problems of the same kind that are reported, such as one per missing file."""


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """One box of a tensor, in one file.

    Attributes:
        box: the elements of the tensor that the piece contains.
        file: path relative to the root of the :class:`StoredModel`, separated by ``/``.
        offset: byte offset of the box's first element in the file.
        strides: distance between neighbours in each dim, in elements of the file.
    """

    box: boxes.Box
    file: str
    offset: int
    strides: tuple[int, ...]


class PieceTable(Sequence[StoredPiece]):
    """The pieces of a tensor. A piece is created when it is needed. Each access may read from files.

    Raises:
        CheckpointError: from every access, if files are damaged or missing.
    """

    @abstractmethod
    def within(self, box: boxes.Box) -> Sequence[StoredPiece]:
        """Return the pieces with elements of ``box``, without replicas."""

    @abstractmethod
    def load(self) -> tuple[StoredPiece, ...]:
        """Return all pieces, without replicas."""

    def uncovered(self, shape: Sequence[int]) -> int:
        """Return the number of elements of the tensor that are in no piece. Checks the files of all pieces."""
        return boxes.count_uncovered(shape, [piece.box for piece in self.load()])

    def files(self) -> set[str]:
        """Return the files of the pieces, and possibly those of replicas."""
        return {piece.file for piece in self.load()}

    def key(self) -> Hashable:
        """Return a key that is equal for two tables whose pieces are the same bytes of the same files."""
        return frozenset(self.load())

    def __len__(self) -> int:
        return len(self.load())

    def __getitem__(self, index: Any) -> Any:
        return self.load()[index]

    def __iter__(self) -> Iterator[StoredPiece]:
        return iter(self.load())


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and its pieces. Tied tensors have pieces with the same files and offsets.

    Attributes:
        name: canonical name, without wrapper attributes; for optimizer state, the name of the parameter.
        dtype: torch's name without ``torch.``: ``float32``, ``bfloat16``, ``float8_e4m3fn``.
        shape: global shape.
        pieces: where its boxes are stored, without replicas.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Sequence[StoredPiece]

    def uncovered(self) -> int:
        """Return the number of elements that are in no piece."""
        if isinstance(self.pieces, PieceTable):
            return self.pieces.uncovered(self.shape)
        return boxes.count_uncovered(self.shape, [piece.box for piece in self.pieces])

    def files(self) -> set[str]:
        """Return the files of the pieces."""
        return self.pieces.files() if isinstance(self.pieces, PieceTable) else {piece.file for piece in self.pieces}

    def within(self, box: boxes.Box) -> Sequence[StoredPiece]:
        """Return the pieces that may contain elements of ``box``.

        Raises:
            CheckpointError: some elements of the box are in no piece. This is checked here if the pieces are created on
                access, and otherwise when the checkpoint is read.
        """
        if not isinstance(self.pieces, PieceTable):
            return self.pieces
        found = self.pieces.within(box)
        parts = [common for piece in found if (common := boxes.intersect(box, piece.box)) is not None]
        inside = [boxes.Box(tuple(a - b for a, b in zip(p.offsets, box.offsets, strict=True)), p.sizes) for p in parts]
        if missing := boxes.count_uncovered(box.sizes, inside):
            message = f"{plural(missing, 'element')} of {self.name} are in none of the files."
            raise CheckpointError([Problem(code="FSDP-E458", message=message, fix=COPY_AGAIN)])
        return found

    def parts_of(self, box: boxes.Box) -> Iterator[tuple[StoredPiece, boxes.Box, int]]:
        """Yield each piece with elements of ``box``, these elements, and the byte offset of the first one in its file.

        Raises the errors of :meth:`within`.
        """
        for piece in self.within(box):
            if (common := boxes.intersect(box, piece.box)) is not None:
                ahead = zip(common.offsets, piece.box.offsets, piece.strides, strict=True)
                first = sum((here - origin) * stride for here, origin, stride in ahead)
                yield piece, common, piece.offset + first * boxes.dtype_size(self.dtype)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """Every entry of a model's state dict.

    Attributes:
        root: the folder that the files of the pieces are relative to.
        format: name of the :class:`CheckpointFormat`: ``dcp``, ``full``, ``bin`` or ``per_rank``.
        tensors: name -> tensor.
        files: every file that the reader opened, as in :class:`StoredPiece`.
        objects: name -> value, of the entries that are not tensors.
    """

    root: Path
    format: str
    tensors: dict[str, StoredTensor]
    files: tuple[str, ...]
    objects: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredOptimizer:
    """An optimizer's state dict, keyed by parameter names.

    Attributes:
        root: the folder that the files of the pieces are relative to.
        format: as in :class:`StoredModel`.
        state: parameter -> key (``exp_avg``, ``step``) -> tensor, or a plain value.
        groups: one dict per parameter group: ``params`` is a list of names, the rest are hyperparameters.
        files: as in :class:`StoredModel`.
    """

    root: Path
    format: str
    state: dict[str, dict[str, StoredTensor | Any]]
    groups: list[dict[str, Any]]
    files: tuple[str, ...]


StateLayout = Literal["like_parameter", "scalar", "other"]
_RANGE, _INNER = "@", "."


def state_layout(key: str, shape: tuple[int, ...], parameter_shape: tuple[int, ...]) -> StateLayout:
    """Return the layout of the state tensor ``key``. Both shapes are of whole tensors, or both are of local tensors."""
    if math.prod(shape) == 1 and (key == "step" or shape != parameter_shape):
        return "scalar"
    return "like_parameter" if shape == parameter_shape else "other"


def unsupported_values(value: Any) -> list[Any]:
    """Return the parts of a value that cannot be stored: all except numbers, texts and containers of them."""
    if isinstance(value, dict):
        keys = [key for key in value if not isinstance(key, (str, int))]
        return keys + [found for item in value.values() for found in unsupported_values(item)]
    if isinstance(value, (list, tuple)):
        return [found for item in value for found in unsupported_values(item)]
    return [] if value is None or isinstance(value, (bool, int, float, str)) else [value]


def range_of(held: Iterable[boxes.Box], shape: tuple[int, ...]) -> str:
    """Return the elements of a shard as text: index of the first one in the flattened parameter ``+`` their number."""
    found = list(held)
    first = sum(offset * stride for offset, stride in zip(found[0].offsets, boxes.row_major(shape), strict=True))
    return f"{first}+{sum(box.numel for box in found)}"


def per_shard_key(key: str, elements: str) -> str:
    """Return the key of state that belongs to one shard. ``elements`` is from :func:`range_of`."""
    return f"{key}{_RANGE}{elements}"


def split_key(key: str) -> tuple[str, str | None]:
    """Return the key without a range, and the range; ``None`` if the key has no range."""
    name, _, elements = key.partition(_RANGE)
    return (name, elements) if elements else (key, None)


def inner_key(key: str, attribute: str) -> str:
    """Return the key of an inner tensor of a tensor subclass."""
    return f"{key}{_INNER}{attribute}"


def split_inner_key(key: str) -> tuple[str, str]:
    """Return the key of the state and the name of the inner tensor, which is empty for other tensors."""
    name, _, attribute = key.partition(_INNER)
    return name, attribute


class StoredState(NamedTuple):
    """The state dict of a model or an optimizer, as the reader of a format returns it.

    Attributes:
        entries: path within the state dict -> tensor or other value. A value can be a nested dict or list of them.
        files: every file that the reader opened, relative to the root.
        place: the file or folder that describes the tensors, for messages.
        fix: remedy if elements are in none of the files.
    """

    entries: dict[tuple[Any, ...], Any]
    files: tuple[str, ...]
    place: Path
    fix: str = COPY_AGAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFormat:
    """One way to store a model and an optimizer: a file of this package, and one or more rows of ``FORMATS``.

    Attributes:
        name: the value of ``format`` in ``inspect --json``.
        state_dict_type: the ``fsdp_state_dict_type`` that it stores.
        model_files: glob patterns, relative to the checkpoint, of the files that identify the format. ``{number}`` is
            the number of the model, ``{suffix}`` is ``_{number}`` and empty for model 0.
        read: (checkpoint, ``FSDP_MODEL`` or ``OPTIMIZER``, number of the model or optimizer) -> its state dict;
            ``None`` if it is not stored in this format.
        hugging_face_names: whether parameters have the names that ``save_pretrained`` writes, which can differ from
            those of the modules.
        index_files: names of files in the folder of the model that contain no tensors and only describe other files.
    """

    name: str
    state_dict_type: StateDictKind
    model_files: tuple[str, ...]
    read: Callable[[Path, str, int], StoredState | None]
    hugging_face_names: bool = False
    index_files: tuple[str, ...] = ()

    def patterns(self, number: int) -> list[str]:
        """Return ``model_files`` for the model with this number."""
        return [file.format(number=number, suffix=f"_{number}" if number else "") for file in self.model_files]


def without_replicas(pieces: Iterable[StoredPiece]) -> tuple[StoredPiece, ...]:
    """Return one piece per non-empty box. Pieces with the same box contain the same elements."""
    by_box: dict[boxes.Box, StoredPiece] = {}
    for piece in pieces:
        if piece.box.numel:
            by_box.setdefault(piece.box, piece)
    return tuple(by_box.values())


def shared_tensors(model: StoredModel) -> list[tuple[str, ...]]:
    """Return the groups of names whose tensors are stored in the same bytes of the same files."""
    by_place: dict[tuple[str, tuple[int, ...], Hashable], list[str]] = {}
    for name, tensor in model.tensors.items():
        place = tensor.pieces.key() if isinstance(tensor.pieces, PieceTable) else frozenset(tensor.pieces)
        by_place.setdefault((tensor.dtype, tensor.shape, place), []).append(name)
    return [tuple(names) for key, names in by_place.items() if len(names) > 1 and math.prod(key[1]) > 0]


def labelled_tensors(stored: StoredModel | StoredOptimizer) -> Iterator[tuple[str, StoredTensor]]:
    """Yield every tensor with a label for messages: ``model.norm.weight``, or ``exp_avg of model.norm.weight``."""
    if isinstance(stored, StoredModel):
        yield from stored.tensors.items()
        return
    for name, entry in stored.state.items():
        yield from ((f"{key} of {name}", value) for key, value in entry.items() if isinstance(value, StoredTensor))


_MIN_SPLIT = 64 << 10
"""Ranges of at most this many bytes are read at once, even if most bytes are not needed."""


def read_run(files: InputFiles, tensor: StoredTensor, start: int, stop: int, out: memoryview) -> None:
    """Read the elements ``[start, stop)`` of the row-major tensor into ``out``, which has the same size in bytes."""
    size = boxes.dtype_size(tensor.dtype)
    for box in boxes.flat_range(tensor.shape, start, stop):
        part, out = out[: box.numel * size], out[box.numel * size :]
        for piece, common, offset in tensor.parts_of(box):
            within = boxes.Box(tuple(each.start for each in boxes.relative_slices(common, box)), common.sizes)
            first = boxes.flat_start(within, box.sizes)
            if first is not None and boxes.is_row_major(piece.strides, common.sizes):
                files.read(piece.file, offset, part[first * size : (first + common.numel) * size])
                continue
            import numpy

            target = numpy.frombuffer(part, f"u{size}").reshape(box.sizes)[boxes.relative_slices(common, box)]
            _read_strided(files, piece.file, offset, piece.strides, target)


def _read_strided(files: InputFiles, file: str, offset: int, strides: Sequence[int], target: NDArray[Any]) -> None:
    """Fill ``target`` with elements that are ``strides`` apart in the file.

    The range from the first to the last element is read at once, unless it is large or most of it is not needed.
    """
    import numpy

    count = boxes.element_span(strides, target.shape)
    num_bytes = count * target.itemsize
    if num_bytes > MAX_SPAN or (num_bytes > _MIN_SPLIT and count > 4 * target.size):
        dim = max((d for d, size in enumerate(target.shape) if size > 1), key=lambda d: strides[d])
        low, high = numpy.array_split(target, 2, axis=dim)
        _read_strided(files, file, offset, strides, low)
        _read_strided(files, file, offset + low.shape[dim] * strides[dim] * target.itemsize, strides, high)
        return
    stored = numpy.empty(count, target.dtype)
    files.read(file, offset, stored.data.cast("B"))
    steps = [stride * target.itemsize for stride in strides]
    target[...] = numpy.lib.stride_tricks.as_strided(stored, target.shape, steps)
