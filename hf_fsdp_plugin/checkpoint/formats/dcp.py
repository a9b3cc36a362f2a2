"""The format ``dcp``: folders of ``torch.distributed.checkpoint``.

A folder has a ``.metadata`` pickle, and ``.distcp`` files that are sequences of small zips. Accelerate and the Trainer
write this format for sharded state dicts of FSDP1 and FSDP2, and so does this package.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint.errors import COPY_AGAIN, file_problems_inside, raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.file_io import InputFiles, read_file, without_collection
from hf_fsdp_plugin.checkpoint.formats import pickles, stored_tensors
from hf_fsdp_plugin.checkpoint.formats.boxes import Box, element_span, is_within, row_major, whole_box
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StatePath, StoredPiece, StoredState, StoredTensor
from hf_fsdp_plugin.checkpoint.formats.torch_files import TensorZips
from hf_fsdp_plugin.checkpoint.names import DCP_METADATA, DCP_SUFFIX, FSDP_MODEL, OPTIMIZER, numbered_name


def read_state(root: Path, stem: str, number: int) -> StoredState | None:
    """Return the entries of a model or an optimizer; a model's may be below ``model`` or at the top."""
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


@without_collection()
def _read_metadata(root: Path, folder: Path) -> StoredState:
    place = folder / DCP_METADATA
    metadata = pickles.read_pickle(read_file(place), place)
    archives = _Archives(root)
    prefix = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
    try:
        entries = _parse_metadata(metadata, prefix, archives)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        message = f"is not in the form that torch.distributed.checkpoint writes ({type(error).__name__}: {error})."
        refuse("FSDP-E453", place, message)
    _check_files(folder, place, metadata)
    objects = {path: value for path, value in entries.items() if isinstance(value, StoredPiece)}
    values = entries | {path: archives.value(path, piece) for path, piece in objects.items()}
    files = sorted({piece.file for piece in objects.values()})
    return StoredState(values, (place.relative_to(root).as_posix(), *files), place)


def _parse_metadata(metadata: Any, prefix: str, archives: _Archives) -> dict[StatePath, StoredTensor | StoredPiece]:
    """Return the tensors, and the archives of other entries. Can raise any exception for what DCP does not write."""
    if not isinstance(metadata, pickles.Metadata):
        raise TypeError(f"a {type(metadata).__name__} instead of Metadata")
    stored = {}
    for key, place in metadata.storage_data.items():
        if getattr(place, "transform_descriptors", None):
            raise ValueError(f"its bytes are transformed by {reprlib.repr(place.transform_descriptors)}")
        offset = getattr(key, "offset", None)
        stored[key.fqn, None if offset is None else _numbers(offset)] = place
    paths = getattr(metadata, "planner_data", None) or {}

    def piece(name: str, box: Box | None) -> StoredPiece:
        place = stored[name, None if box is None else box.offsets]
        start, length = _numbers((place.offset, place.length))
        box = whole_box(()) if box is None else box
        return StoredPiece(box, prefix + place.relative_path, start, row_major(box.sizes), length)

    entries: dict[StatePath, StoredTensor | StoredPiece] = {}
    for name, entry in metadata.state_dict_metadata.items():
        path = _path_of(name, paths)
        if isinstance(entry, pickles.BytesMetadata):
            entries[path] = piece(name, None)
            continue
        dtype, shape = entry.properties.dtype, _numbers(entry.size)
        boxes = [Box(_numbers(chunk.offsets), _numbers(chunk.sizes)) for chunk in entry.chunks]
        if dtype not in stored_tensors.SIZES or not all(is_within(box, shape) for box in boxes):
            raise ValueError(f"entry {name!r}: {boxes} of {dtype} {shape}")
        pieces = stored_tensors.without_replicas([piece(name, box) for box in boxes])
        entries[path] = StoredTensor(str(path[-1]), dtype, shape, pieces, archives.opened)
    return entries


def _check_files(folder: Path, place: Path, metadata: pickles.Metadata) -> None:
    """Check that the files exist, and that they contain all archives."""
    stops: dict[str, int] = {}
    for region in metadata.storage_data.values():
        stops[region.relative_path] = max(stops.get(region.relative_path, 0), region.offset + region.length)
    raise_if_any(file_problems_inside(folder, stops, place))
    for file, stop in stops.items():
        if (size := (folder / file).stat().st_size) < stop:
            message = f"has {size} bytes, but {DCP_METADATA} refers to bytes up to {stop}."
            refuse("FSDP-E453", folder / file, message)


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    for number in numbers:
        if type(number) is not int or number < 0:
            raise ValueError(f"{reprlib.repr(numbers)} are not sizes")
    return numbers


def _path_of(name: str, paths: Mapping[Any, Any]) -> StatePath:
    """Return the path of an entry. Without one in the metadata, it is the top key and the rest of the name."""
    top, _, rest = name.partition(".")
    path = paths.get(name) or ((top, rest) if top in ("model", "optimizer") and rest else (name,))
    if not all(isinstance(part, (str, int)) for part in path):
        raise TypeError(f"the path {reprlib.repr(path)}")
    return tuple(path)


class _Archives:
    """Reads the archives in the files of a checkpoint. The files stay open for the next tensor."""

    def __init__(self, root: Path) -> None:
        self._root, self._files, self._zips = root, InputFiles(root), TensorZips()

    def value(self, path: StatePath, piece: StoredPiece) -> Any:
        """Return an entry that ``.metadata`` does not describe: an object, or a tensor."""
        value, offset = self._read(piece)
        if not isinstance(value, pickles.PickledTensor):
            return value
        return stored_tensors.tensor_in_file(str(path[-1]), value.dtype, value.shape, piece.file, offset, value.strides)

    def opened(self, expected: StoredTensor, piece: StoredPiece) -> StoredPiece:
        """Return a piece with the place of its elements. Checks that the archive contains a tensor of its box."""
        tensor, offset = self._read(piece)
        found = type(tensor).__name__
        if isinstance(tensor, pickles.PickledTensor):
            found = f"{tensor.dtype} {tensor.shape}"
            # torch copies a tensor whose elements are not adjacent. Smaller strides would be read unnoticed.
            if 0 not in tensor.shape and element_span(tensor.strides, tensor.shape) != math.prod(tensor.shape):
                found = f"{found} with the strides {tensor.strides}"
        if found != f"{expected.dtype} {piece.box.sizes}":
            wanted = f"{DCP_METADATA} expects {expected.dtype} {piece.box.sizes} of {expected.name!r} there"
            message = f"contains {found} at byte {piece.offset}, but {wanted}."
            fix = f"The files are of different checkpoints. {COPY_AGAIN}"
            refuse("FSDP-E459", self._root / piece.file, message, fix)
        return piece._replace(offset=offset, strides=tensor.strides, archive=0)

    def _read(self, piece: StoredPiece) -> tuple[Any, int]:
        """Return the saved object, and the byte offset of its first element in the file."""
        place = self._root / piece.file
        return self._zips.read(self._files.opened(piece.file), piece.offset, piece.archive, place)
