"""The format ``dcp``: folders of ``torch.distributed.checkpoint``.

A folder has a ``.metadata`` pickle, and ``.distcp`` files that are sequences of small zips. Accelerate and the Trainer
write this format for sharded state dicts of FSDP1 and FSDP2, and so does this package.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint.formats.boxes import Box, whole, within
from hf_fsdp_plugin.checkpoint.formats.element_types import SIZES
from hf_fsdp_plugin.checkpoint.formats.errors import COPY_AGAIN, raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.formats.nested import nested_value, optimizer_parts
from hf_fsdp_plugin.checkpoint.formats.pickles import (
    BytesMetadata,
    Metadata,
    PickledTensor,
    Region,
    TensorMetadata,
    read_pickle,
)
from hf_fsdp_plugin.checkpoint.formats.stored import (
    CheckpointFormat,
    StoredModel,
    StoredOptimizer,
    StoredPiece,
    StoredTensor,
    coverage_problems,
    file_problems_inside,
    without_replicas,
)
from hf_fsdp_plugin.checkpoint.formats.torch_zip import TensorZips
from hf_fsdp_plugin.checkpoint.io import open_regular, read_file
from hf_fsdp_plugin.checkpoint.names import DCP_METADATA, DCP_SUFFIX, FSDP_MODEL, OPTIMIZER, numbered
from hf_fsdp_plugin.plan.names import canonical_name


def read_model(root: Path, number: int) -> StoredModel | None:
    """Return the model: the entries under ``model``, or all entries if there are none under ``model``."""
    folder = _folder(root, numbered(FSDP_MODEL, number))
    if folder is None:
        return None
    entries, files = _read(root, folder)
    if entries and all(path[0] == "optimizer" for path in entries):
        fix = "Give the folder of the checkpoint, or of its model."
        refuse("FSDP-E451", folder, "contains an optimizer and no model.", fix)
    if any(path[0] == "model" and len(path) > 1 for path in entries):
        entries = {path[1:]: value for path, value in entries.items() if path[0] == "model"}
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Any] = {}
    for path, value in entries.items():
        name = canonical_name(".".join(map(str, path)))
        if isinstance(value, StoredTensor):
            tensors[name] = replace(value, name=name)
        else:
            objects[name] = value
    return StoredModel(root, FORMAT.name, tensors, files, objects)


def read_optimizer(root: Path, number: int) -> StoredOptimizer | None:
    """Return the optimizer, or ``None`` if the checkpoint has none in this format."""
    folder = _folder(root, numbered(OPTIMIZER, number))
    if folder is None:
        return None
    found, files = _read(root, folder)
    entries = {path[1:]: value for path, value in found.items() if path[0] == "optimizer"}
    if not entries:
        return None
    state, groups = optimizer_parts(nested_value(entries), root, folder)
    return StoredOptimizer(root, FORMAT.name, state, groups, files)


def _folder(checkpoint: Path, name: str) -> Path | None:
    """Return ``checkpoint`` itself or the folder ``name`` in it, whichever contains ``.metadata``."""
    for folder in (checkpoint, checkpoint / name):
        if (folder / DCP_METADATA).is_file():
            return folder
        if folder.is_dir() and any(folder.glob(f"*{DCP_SUFFIX}")):
            message = f"has no {DCP_METADATA}: the save was not finished, or hidden files were not copied."
            refuse("FSDP-E452", folder, message, "Use an earlier checkpoint, or copy this one again.")
    return None


_Path = tuple[Any, ...]


def _read(root: Path, folder: Path) -> tuple[dict[_Path, Any], tuple[str, ...]]:
    """Return the entries, path within the state dict -> tensor (named by its path) or other value, and the files."""
    place = folder / DCP_METADATA
    metadata = read_pickle(read_file(place), place)
    try:
        entries, paths = _parse_metadata(metadata)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        message = f"is not in the form that torch.distributed.checkpoint writes ({type(error).__name__}: {error})."
        refuse("FSDP-E453", place, message)
    with ExitStack() as stack:
        files = _open(root, folder, {region.file for entry in entries for region in entry.regions}, stack)
        zips = TensorZips()
        values = {paths[entry.name]: _value(entry, files, zips) for entry in entries}
    raise_if_any(coverage_problems(place, (v for v in values.values() if isinstance(v, StoredTensor))))
    return values, (place.relative_to(root).as_posix(), *sorted(file.relative for file in files.values()))


@dataclass(frozen=True, slots=True)
class _Bytes:
    """The bytes of a file that contain one zip."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of the state dict: its boxes, and the file range of each box; an object has no boxes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    regions: tuple[_Bytes, ...]


def _parse_metadata(metadata: Any) -> tuple[list[_Entry], dict[str, _Path]]:
    """Return the entries and their paths. Can raise any exception for an object that DCP does not write."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"a {type(metadata).__name__} instead of Metadata")
    stored = {(key.fqn, _offset(key)): _region(value) for key, value in metadata.storage_data.items()}
    paths = getattr(metadata, "planner_data", None) or {}
    entries = []
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesMetadata):
            entries.append(_Entry(name, "", (), (), (stored[name, None],)))
        elif isinstance(entry, TensorMetadata):
            boxes = tuple(Box(_numbers(chunk.offsets), _numbers(chunk.sizes)) for chunk in entry.chunks)
            regions = tuple(stored[name, box.offsets] for box in boxes)
            shape = _numbers(entry.size)
            if entry.properties.dtype not in SIZES or not all(within(box, shape) for box in boxes):
                raise ValueError(f"entry {name!r}: {boxes} of {entry.properties.dtype} {shape}")
            entries.append(_Entry(name, entry.properties.dtype, shape, boxes, regions))
        else:
            raise TypeError(f"entry {name!r} is a {type(entry).__name__}")
    return entries, {entry.name: _check_path(paths.get(entry.name) or _split(entry.name)) for entry in entries}


def _offset(key: Any) -> tuple[int, ...] | None:
    offset = getattr(key, "offset", None)
    return None if offset is None else _numbers(offset)


def _region(value: Any) -> _Bytes:
    if not isinstance(value, Region):
        raise TypeError(f"a {type(value).__name__} instead of _StorageInfo")
    if getattr(value, "transform_descriptors", None):
        raise ValueError(f"its bytes are transformed by {value.transform_descriptors}")
    (start, length) = _numbers((value.offset, value.length))
    return _Bytes(str(value.relative_path), start, length)


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers} are not sizes")
    return numbers


def _check_path(path: Any) -> _Path:
    if not all(isinstance(part, (str, int)) for part in path):
        raise TypeError(f"the path {path}")
    return tuple(path)


def _split(name: str) -> _Path:
    """Return the path of an entry for which the metadata has no path: the top key, and the rest of the name."""
    top, _, rest = name.partition(".")
    return (top, rest) if top in ("model", "optimizer") and rest else (name,)


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    relative: str
    """Path relative to the checkpoint."""
    descriptor: int
    size: int


def _open(root: Path, folder: Path, names: set[str], stack: ExitStack) -> dict[str, _File]:
    raise_if_any(file_problems_inside(folder, sorted(names), folder / DCP_METADATA))
    files: dict[str, _File] = {}
    for name in names:
        path = folder / name
        descriptor = open_regular(path)
        stack.callback(os.close, descriptor)
        files[name] = _File(path, path.relative_to(root).as_posix(), descriptor, os.fstat(descriptor).st_size)
    return files


def _value(entry: _Entry, files: dict[str, _File], zips: TensorZips) -> Any:
    if entry.dtype:
        return StoredTensor(entry.name, entry.dtype, entry.shape, without_replicas(_pieces(entry, files, zips)))
    region = entry.regions[0]
    file = _file_of(region, files)
    value, offset = zips.read(file.descriptor, region.start, region.length, file.path)
    if not isinstance(value, PickledTensor):
        return value
    piece = StoredPiece(whole(value.shape), file.relative, offset, value.strides)
    return StoredTensor(entry.name, value.dtype, value.shape, without_replicas([piece]))


def _pieces(entry: _Entry, files: dict[str, _File], zips: TensorZips) -> Iterator[StoredPiece]:
    for box, region in zip(entry.boxes, entry.regions, strict=True):
        file = _file_of(region, files)
        tensor, offset = zips.read(file.descriptor, region.start, region.length, file.path)
        if not isinstance(tensor, PickledTensor) or (tensor.dtype, tensor.shape) != (entry.dtype, box.sizes):
            found = f"{tensor.dtype} {tensor.shape}" if isinstance(tensor, PickledTensor) else type(tensor).__name__
            message = (
                f"contains {found} at byte {region.start}, but {DCP_METADATA} expects {entry.dtype} {box.sizes} of "
                f"{entry.name!r} there."
            )
            refuse("FSDP-E459", file.path, message, f"The files are of different checkpoints. {COPY_AGAIN}")
        yield StoredPiece(box, file.relative, offset, tensor.strides)


def _file_of(region: _Bytes, files: dict[str, _File]) -> _File:
    file = files[region.file]
    if region.start + region.length > file.size:
        stop = region.start + region.length
        message = f"has {file.size} bytes, but {DCP_METADATA} refers to bytes {region.start} to {stop}."
        refuse("FSDP-E453", file.path, message)
    return file


FORMAT = CheckpointFormat(
    name="dcp",
    state_dict_type="sharded",
    model_files=(f"{FSDP_MODEL}_{{number}}/{DCP_METADATA}",),
    read_model=read_model,
    read_optimizer=read_optimizer,
    index_files=(DCP_METADATA,),
)
