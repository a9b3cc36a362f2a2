"""Where the tensors of a checkpoint are stored: names, boxes, files and byte offsets, in the same form for all formats.

The readers of the formats read headers and metadata only. ``checkpoint.reading.resharding`` reads the elements, with
the file, byte offset and strides that are recorded here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

from hf_fsdp_plugin.checkpoint.errors import COPY_AGAIN, refuse
from hf_fsdp_plugin.checkpoint.file_io import read_range
from hf_fsdp_plugin.checkpoint.formats import boxes
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.text import format_names, plural

MAX_PROBLEMS = 8
"""Maximum number of problems of the same kind that are reported, such as one per missing file."""
_FLOAT8 = "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"

SIZES: Final[Mapping[str, int]] = MappingProxyType({
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    "bfloat16": 2, **dict.fromkeys(_FLOAT8, 1),
})  # fmt: skip
"""Type -> bytes per element."""


StatePath = tuple[str | int, ...]
"""Path of an entry in the nested state dict: ``("optimizer", "state", "lm_head.weight", "exp_avg")``."""
TiedPaths = Sequence[tuple[StatePath, StatePath]]
"""Pairs: path of a tied name, and path of the entry that holds its tensor."""


class StoredPiece(NamedTuple):
    """One box of a tensor, in one file.

    Attributes:
        box: the elements of the tensor that the piece contains.
        file: path relative to the root of the :class:`StoredModel`, separated by ``/``.
        offset: byte offset of the box's first element in the file.
        strides: distance between neighbours in each dim, in elements of the file.
        archive: size in bytes of an archive of ``torch.save`` with the box, which begins at ``offset``. The place of
            the elements in it is read when they are. 0 for pieces without an archive of their own.
    """

    box: boxes.Box
    file: str
    offset: int
    strides: tuple[int, ...]
    archive: int = 0

    def stop(self, dtype: str) -> int:
        """Return the byte offset in the file after the piece."""
        span = boxes.element_span(self.strides, self.box.sizes) * SIZES[dtype]
        return self.offset + (self.archive or span)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and its pieces. Tied tensors have pieces with the same files and offsets.

    Attributes:
        name: canonical name, without wrapper attributes; for optimizer state, the name of the parameter.
        dtype: torch's name without ``torch.``: ``float32``, ``bfloat16``, ``float8_e4m3fn``.
        shape: global shape.
        pieces: where its boxes are stored, without replicas.
        open_archive: returns a piece in an archive with the place of its elements.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]
    open_archive: Callable[[StoredTensor, StoredPiece], StoredPiece] | None = field(default=None, compare=False)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]

    def uncovered(self) -> int:
        """Return the number of elements that are in no piece."""
        return math.prod(self.shape) - sum(piece.box.numel for piece in self.pieces)

    def files(self) -> set[str]:
        """Return the files of the pieces."""
        return {piece.file for piece in self.pieces}

    def parts_of(self, box: boxes.Box) -> Iterator[tuple[StoredPiece, boxes.Box, int]]:
        """Yield each piece with elements of ``box``, these elements, and the byte offset of the first one in its file.

        Raises:
            CheckpointError: an archive is damaged, or contains another tensor.
        """
        for piece in self.pieces:
            if (common := boxes.intersect(box, piece.box)) is not None:
                found = self.open_archive(self, piece) if piece.archive and self.open_archive is not None else piece
                ahead = zip(common.offsets, found.box.offsets, found.strides, strict=True)
                first = sum((here - origin) * stride for here, origin, stride in ahead)
                yield found, common, found.offset + first * SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class StoredModel:
    """Every entry of a model's state dict.

    Attributes:
        root: the folder that the files of the pieces are relative to.
        format: name of the format: ``dcp``, ``full``, ``bin``, ``per_rank`` or ``hf_shards``.
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


Stored = TypeVar("Stored", StoredModel, StoredOptimizer)


def entry_name(path: Iterable[Any]) -> str:
    """Return the name of an entry of a state dict, by its path: ``state.lm_head.weight.exp_avg``."""
    return ".".join(map(str, path))


class StoredState(NamedTuple):
    """The state dict of a model or an optimizer, as the reader of a format returns it.

    Attributes:
        entries: path within the state dict -> tensor or other value. A value can be a nested dict or list of them.
            The name of such a tensor can be any; :meth:`as_model` and :meth:`as_optimizer` set it.
        files: every file that the reader opened, relative to the root.
        place: the file or folder that describes the tensors, for messages.
        fix: remedy if elements are in none of the files.
    """

    entries: dict[tuple[Any, ...], Any]
    files: tuple[str, ...]
    place: Path
    fix: str = COPY_AGAIN

    def as_model(self, root: Path, form: str) -> StoredModel:
        """Return the entries by canonical name. The name of an entry is the path to it, joined with dots."""
        named = {canonical_name(entry_name(path)): value for path, value in self.entries.items()}
        tensors = {name: replace(value, name=name) for name, value in named.items() if isinstance(value, StoredTensor)}
        objects = {name: value for name, value in named.items() if name not in tensors}
        return StoredModel(root, form, tensors, self.files, objects)

    def as_optimizer(self, root: Path, form: str) -> StoredOptimizer:
        """Return the entries by parameter, and the parameter groups.

        An optimizer without FSDP numbers its parameters. The numbers are then used as names.

        Raises:
            CheckpointError: the entries are not those of an optimizer's state dict.
        """
        value = _nested_value(self.entries)
        state: dict[str, dict[str, StoredTensor | Any]] = {}
        try:
            for parameter, entry in value.get("state", {}).items():
                name = canonical_name(str(parameter))
                tensors = {key: item for key, item in entry.items() if isinstance(item, StoredTensor)}
                state[name] = {**entry, **{key: replace(tensor, name=name) for key, tensor in tensors.items()}}
            groups = [_group(group, root) for group in value.get("param_groups", [])]
        except (AttributeError, TypeError):
            message = "is not an optimizer's state dict: it does not contain a dict 'state' and a list 'param_groups'."
            fix = "Give a checkpoint that Accelerate, the Trainer or this package wrote."
            refuse("FSDP-E461", self.place, message, fix)
        return StoredOptimizer(root, form, state, groups, self.files)

    def checked(self, stored: Stored) -> Stored:
        """Return ``stored`` if every element of its tensors is in a file."""
        missing = {label: count for label, tensor in labelled_tensors(stored) if (count := tensor.uncovered())}
        if missing:
            amount = f"{plural(sum(missing.values()), 'element')} of {plural(len(missing), 'tensor')}"
            message = f"{amount} are in none of the files: {format_names(missing, 3)}."
            refuse("FSDP-E458", self.place, message, self.fix)
        return stored


def _nested_value(entries: Mapping[tuple[Any, ...], Any]) -> Any:
    """Nest flattened entries: ``{("a", 0, "b"): 1}`` -> ``{"a": [{"b": 1}]}``. Numbers in a path are list indices."""
    if () in entries:
        return entries[()]
    branches: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for path, value in entries.items():
        branches.setdefault(path[0], {})[path[1:]] = value
    if branches and all(isinstance(key, int) for key in branches):
        return [_nested_value(branches[key]) for key in sorted(branches)]
    return {key: _nested_value(branch) for key, branch in branches.items()}


def _group(group: Any, root: Path) -> dict[str, Any]:
    plain = {key: _number(item, root) if isinstance(item, StoredTensor) else item for key, item in group.items()}
    return {**plain, "params": [canonical_name(str(name)) for name in group.get("params", [])]}


def _number(tensor: StoredTensor, root: Path) -> Any:
    """Return the value of a scalar tensor, such as a learning rate; other tensors are returned unchanged."""
    if math.prod(tensor.shape) != 1 or tensor.dtype.startswith(("bfloat16", "float8")):  # which numpy does not have
        return tensor
    import numpy

    piece, _, offset = next(tensor.parts_of(boxes.whole_box(tensor.shape)))
    data = read_range(root / piece.file, offset, SIZES[tensor.dtype])
    return numpy.frombuffer(data, numpy.dtype(tensor.dtype).newbyteorder("<"))[0].item()


def tensor_in_file(
    name: str, dtype: str, shape: tuple[int, ...], file: str, offset: int, strides: tuple[int, ...] | None = None
) -> StoredTensor:
    """Return a tensor that is in one file, from the byte ``offset`` on; row-major without ``strides``."""
    piece = StoredPiece(boxes.whole_box(shape), file, offset, boxes.row_major(shape) if strides is None else strides)
    return StoredTensor(name, dtype, shape, without_replicas([piece]))


def without_replicas(pieces: Iterable[StoredPiece]) -> tuple[StoredPiece, ...]:
    """Return one piece per non-empty box. Pieces with the same box contain the same elements."""
    by_box: dict[boxes.Box, StoredPiece] = {}
    for piece in pieces:
        if piece.box.numel:
            by_box.setdefault(piece.box, piece)
    return tuple(by_box.values())


def shared_tensors(model: StoredModel) -> list[tuple[str, ...]]:
    """Return the groups of names whose tensors are stored in the same bytes of the same files."""
    by_place: dict[tuple[str, tuple[int, ...], frozenset[StoredPiece]], list[str]] = {}
    for name, tensor in model.tensors.items():
        by_place.setdefault((tensor.dtype, tensor.shape, frozenset(tensor.pieces)), []).append(name)
    return [tuple(names) for key, names in by_place.items() if len(names) > 1 and math.prod(key[1]) > 0]


def labelled_tensors(stored: StoredModel | StoredOptimizer) -> Iterator[tuple[str, StoredTensor]]:
    """Yield every tensor with a label for messages: ``model.norm.weight``, or ``exp_avg of model.norm.weight``."""
    if isinstance(stored, StoredModel):
        yield from stored.tensors.items()
        return
    for name, entry in stored.state.items():
        yield from ((f"{key} of {name}", value) for key, value in entry.items() if isinstance(value, StoredTensor))
