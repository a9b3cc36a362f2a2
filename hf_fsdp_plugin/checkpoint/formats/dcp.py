"""The format ``dcp``: folders of ``torch.distributed.checkpoint``.

A folder has a ``.metadata`` pickle, and ``.distcp`` files that are sequences of small zips. Accelerate and the Trainer
write this format for sharded state dicts of FSDP1 and FSDP2, and so does this package.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from hf_fsdp_plugin.checkpoint.errors import COPY_AGAIN, file_problems_inside, raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.formats import pickles, stored_tensors
from hf_fsdp_plugin.checkpoint.formats.boxes import SIZES, Box, count_uncovered, element_span, intersect, is_within
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import PieceTable, StoredPiece, StoredState, StoredTensor
from hf_fsdp_plugin.checkpoint.formats.torch_files import TensorZips
from hf_fsdp_plugin.checkpoint.io import InputFiles, read_file, without_collection
from hf_fsdp_plugin.checkpoint.names import DCP_METADATA, DCP_SUFFIX, FSDP_MODEL, OPTIMIZER, numbered_name

MAX_EAGER = 5_000
"""Maximum number of archives of a folder whose headers are all read, and checked, at once."""


def read_state(root: Path, stem: str, number: int) -> StoredState | None:
    """Return the entries of a model or an optimizer; a model's may be below ``model`` or at the top.

    The pieces of the tensors of large folders are read when they are needed; then ``files`` are only those that were
    read.
    """
    folder = _folder(root, numbered_name(stem, number))
    if folder is None:
        return None
    state = _read_metadata(root, folder)
    top = "model" if stem == FSDP_MODEL else "optimizer"
    own = {path[1:]: value for path, value in state.entries.items() if path[0] == top}
    if stem == OPTIMIZER:
        return state._replace(entries=own) if own else None
    if state.entries and all(path[0] == "optimizer" for path in state.entries):
        fix = "Give the folder of the checkpoint, or of its model."
        refuse("FSDP-E451", folder, "contains an optimizer and no model.", fix)
    return state._replace(entries=own) if any(own) else state


def _folder(checkpoint: Path, name: str) -> Path | None:
    """Return ``checkpoint`` itself or the folder ``name`` in it, whichever contains ``.metadata``."""
    for folder in (checkpoint, checkpoint / name):
        if (folder / DCP_METADATA).is_file():
            return folder
        if folder.is_dir() and any(folder.glob(f"*{DCP_SUFFIX}")):
            message = f"has no {DCP_METADATA}: the save was not finished, or hidden files were not copied."
            refuse("FSDP-E452", folder, message, "Use an earlier checkpoint, or copy this one again.")
    return None


def _prefix(root: Path, folder: Path) -> str:
    """Return the prefix that makes the names of the folder's files relative to the checkpoint."""
    return "" if folder == root else f"{folder.relative_to(root).as_posix()}/"


@without_collection()
def _read_metadata(root: Path, folder: Path) -> StoredState:
    place = folder / DCP_METADATA
    metadata = pickles.read_pickle(read_file(place), place)
    try:
        entries = _parse_metadata(metadata)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        message = f"is not in the form that torch.distributed.checkpoint writes ({type(error).__name__}: {error})."
        refuse("FSDP-E453", place, message)
    is_large = sum(len(entry.archives) for entry in entries) > MAX_EAGER
    values: dict[stored_tensors.StatePath, Any] = {}
    with _Zips(root, folder, place) as zips:
        files = zips.read_all(entry for entry in entries if not (is_large and entry.dtype))
        for entry in entries:
            if entry.dtype:
                pieces = _PiecesInZips(zips, entry, entries) if is_large else zips.pieces(entry)
                values[entry.path] = StoredTensor(str(entry.path[-1]), entry.dtype, entry.shape, pieces)
            else:
                values[entry.path] = zips.value(entry.path, entry.archives[0])
    return StoredState(values, (place.relative_to(root).as_posix(), *files), place)


class ArchivePlace(NamedTuple):
    """The bytes of a file that contain the archive of one entry."""

    file: str
    start: int
    length: int


class _Entry(NamedTuple):
    """One entry of the state dict: its boxes, and the archive of each box; an object has no boxes and no dtype."""

    path: stored_tensors.StatePath
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    archives: tuple[ArchivePlace, ...]


def _parse_metadata(metadata: Any) -> list[_Entry]:
    """Return the entries. Can raise any exception for an object that DCP does not write."""
    if not isinstance(metadata, pickles.Metadata):
        raise TypeError(f"a {type(metadata).__name__} instead of Metadata")
    stored = {}
    for key, place in metadata.storage_data.items():
        offset = getattr(key, "offset", None)
        stored[_text(key.fqn), None if offset is None else _numbers(offset)] = _archive_place(place)
    paths = getattr(metadata, "planner_data", None) or {}
    entries = []
    for name, entry in metadata.state_dict_metadata.items():
        path = _path_of(_text(name), paths)
        if isinstance(entry, pickles.BytesMetadata):
            entries.append(_Entry(path, "", (), (), (stored[name, None],)))
        elif isinstance(entry, pickles.TensorMetadata):
            boxes = tuple(Box(_numbers(chunk.offsets), _numbers(chunk.sizes)) for chunk in entry.chunks)
            archives = tuple(stored[name, box.offsets] for box in boxes)
            shape = _numbers(entry.size)
            if _text(entry.properties.dtype) not in SIZES or not all(is_within(box, shape) for box in boxes):
                raise ValueError(f"entry {name!r}: {boxes} of {entry.properties.dtype} {shape}")
            entries.append(_Entry(path, entry.properties.dtype, shape, boxes, archives))
        else:
            raise TypeError(f"entry {name!r} is a {type(entry).__name__}")
    return entries


def _text(value: Any) -> str:
    """Return a name, checked: hashing and printing other objects of a hostile pickle could take very long."""
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} instead of a name")
    return value


def _archive_place(value: Any) -> ArchivePlace:
    if not isinstance(value, pickles.Region):
        raise TypeError(f"a {type(value).__name__} instead of _StorageInfo")
    if getattr(value, "transform_descriptors", None):
        raise ValueError(f"its bytes are transformed by {reprlib.repr(value.transform_descriptors)}")
    (start, length) = _numbers((value.offset, value.length))
    return ArchivePlace(_text(value.relative_path), start, length)


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    for number in numbers:
        if type(number) is not int or number < 0:
            raise ValueError(f"{reprlib.repr(numbers)} are not sizes")
    return numbers


def _path_of(name: str, paths: Mapping[Any, Any]) -> stored_tensors.StatePath:
    """Return the path of an entry. Without one in the metadata, it is the top key and the rest of the name."""
    top, _, rest = name.partition(".")
    path = paths.get(name) or ((top, rest) if top in ("model", "optimizer") and rest else (name,))
    if not all(isinstance(part, (str, int)) for part in path):
        raise TypeError(f"the path {reprlib.repr(path)}")
    return tuple(path)


class _Zips(InputFiles):
    """Reads the headers of the archives in a folder's files, which stay open until the end of the block.

    Args:
        place: the file that refers to the archives, for messages.
    """

    def __init__(self, root: Path, folder: Path, place: Path) -> None:
        super().__init__(folder)
        self._folder, self._place = folder, place
        self._prefix = _prefix(root, folder)
        self._sizes: dict[str, int] = {}
        self._archives = TensorZips()
        self._pieces: dict[tuple[stored_tensors.StatePath, int], StoredPiece] = {}

    def read_all(self, entries: Iterable[_Entry]) -> list[str]:
        """Read all pieces, one file after the other. Return the files, relative to the checkpoint."""
        found = [(each.file, entry, number) for entry in entries for number, each in enumerate(entry.archives)]
        self._check_files({file for file, _, _ in found})
        for _, entry, number in sorted(found, key=itemgetter(0)):
            if entry.dtype:
                self._piece(entry, number)
        return sorted({self._prefix + file for file, _, _ in found})

    def pieces(self, entry: _Entry, numbers: Iterable[int] | None = None) -> tuple[StoredPiece, ...]:
        """Return the pieces with these numbers, or all, without replicas."""
        numbers = range(len(entry.archives)) if numbers is None else numbers
        return stored_tensors.without_replicas([self._piece(entry, number) for number in numbers])

    def value(self, path: stored_tensors.StatePath, archive: ArchivePlace) -> Any:
        """Return an entry that ``.metadata`` does not describe: an object, or a tensor."""
        value, offset = self._read_archive(archive)
        if not isinstance(value, pickles.PickledTensor):
            return value
        file = self._prefix + archive.file
        return stored_tensors.tensor_in_file(str(path[-1]), value.dtype, value.shape, file, offset, value.strides)

    def _piece(self, entry: _Entry, number: int) -> StoredPiece:
        if (entry.path, number) not in self._pieces:
            box, archive = entry.boxes[number], entry.archives[number]
            tensor, offset = self._read_archive(archive)
            found = type(tensor).__name__
            if isinstance(tensor, pickles.PickledTensor):
                found = f"{tensor.dtype} {tensor.shape}"
                # torch copies a tensor whose elements are not adjacent. Smaller strides would be read unnoticed.
                if 0 not in tensor.shape and element_span(tensor.strides, tensor.shape) != math.prod(tensor.shape):
                    found = f"{found} with the strides {tensor.strides}"
            if found != f"{entry.dtype} {box.sizes}":
                name = stored_tensors.entry_name(entry.path)
                expected = f"{DCP_METADATA} expects {entry.dtype} {box.sizes} of {name!r} there"
                message = f"contains {found} at byte {archive.start}, but {expected}."
                fix = f"The files are of different checkpoints. {COPY_AGAIN}"
                refuse("FSDP-E459", self._folder / archive.file, message, fix)
            self._pieces[entry.path, number] = StoredPiece(box, self._prefix + archive.file, offset, tensor.strides)
        return self._pieces[entry.path, number]

    def _read_archive(self, place: ArchivePlace) -> tuple[Any, int]:
        """Return the saved object, and the byte offset of its first element in the file."""
        self.check([place])
        return self._archives.read(self.descriptor(place.file), place.start, place.length, self._folder / place.file)

    def files(self, entry: _Entry) -> set[str]:
        """Return the files of an entry, relative to the checkpoint."""
        return {self._prefix + archive.file for archive in entry.archives}

    def check(self, archives: Sequence[ArchivePlace]) -> None:
        """Check that the files of the archives exist, and that they contain them."""
        self._check_files({archive.file for archive in archives})
        for file, start, length in archives:
            if start + length > self._sizes[file]:
                message = f"has {self._sizes[file]} bytes, but {DCP_METADATA} refers to bytes {start} to"
                refuse("FSDP-E453", self._folder / file, f"{message} {start + length}.")

    def _check_files(self, files: set[str]) -> None:
        if new := sorted(files - self._sizes.keys()):
            raise_if_any(file_problems_inside(self._folder, new, self._place))
            self._sizes |= {file: (self._folder / file).stat().st_size for file in new}


class _PiecesInZips(PieceTable):
    """The pieces of a tensor of a large folder. The header of an archive is read when it is needed."""

    def __init__(self, zips: _Zips, entry: _Entry, entries: Sequence[_Entry]) -> None:
        self._zips, self._entry, self._entries = zips, entry, entries

    def within(self, box: Box) -> Sequence[StoredPiece]:
        numbers = [number for number, own in enumerate(self._entry.boxes) if intersect(box, own) is not None]
        try:  # the files stay open for the next tensor
            return self._zips.pieces(self._entry, numbers)
        except BaseException:
            self._zips.__exit__()
            raise

    def load(self) -> tuple[StoredPiece, ...]:
        with self._zips:
            self._zips.read_all(self._entries)  # the entries of all tensors, because a file has pieces of many
            return self._zips.pieces(self._entry)

    def uncovered(self, shape: Sequence[int]) -> int:
        self._zips.check(self._entry.archives)
        return count_uncovered(shape, self._entry.boxes)

    def files(self) -> set[str]:
        return self._zips.files(self._entry)

    def key(self) -> Hashable:
        return frozenset(self._entry.archives)
