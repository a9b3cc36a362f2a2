"""Checkpoints of ``torch.distributed.checkpoint``: a ``.metadata`` pickle, and files of one small zip after another.

Accelerate and the Trainer write them for a sharded state dict, FSDP1 and FSDP2 alike, and so do we.
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
    COPY_AGAIN,
    StoredModel,
    StoredOptimizer,
    StoredPiece,
    StoredTensor,
    file_inside,
    refuse,
    uncovered_problems,
    unreplicated,
)
from hf_fsdp_plugin.checkpoint.formats.torch_zip import TensorZips
from hf_fsdp_plugin.checkpoint.names import DCP_METADATA
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import CheckpointError, Problem


def read_dcp_model(root: Path, folder: Path) -> StoredModel:
    """The model in a DCP folder: what stands under ``model``, or all of it where nothing does."""
    entries = _read(root, folder)
    if entries and all(path[0] == "optimizer" for path in entries):
        refuse(folder, "it holds an optimizer and no model.", "Name the folder of the model, or the checkpoint's.")
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
    return StoredModel(root, "dcp", tensors, objects)


def read_dcp_optimizer(root: Path, folder: Path) -> StoredOptimizer | None:
    """The optimizer in a DCP folder, or ``None`` where it holds none."""
    entries = {path[1:]: value for path, value in _read(root, folder).items() if path[0] == "optimizer"}
    if not entries:
        return None
    state, groups = optimizer_parts(nested_value(entries), root, folder)
    return StoredOptimizer(root, "dcp", state, groups)


_Path = tuple[Any, ...]


def _read(root: Path, folder: Path) -> dict[_Path, Any]:
    """Path within the state dict -> tensor (with its path as name), or value."""
    place = folder / DCP_METADATA
    metadata = read_pickle(place.read_bytes(), place)
    try:
        entries, paths = _entries(metadata)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        refuse(place, f"not what torch.distributed.checkpoint writes ({type(error).__name__}: {error}).", COPY_AGAIN)
    with ExitStack() as stack:
        files = _open(root, folder, {region.file for entry in entries for region in entry.regions}, stack)
        zips = TensorZips()
        values = {paths[entry.name]: _value(entry, files, zips) for entry in entries}
    problems = uncovered_problems(place, (v for v in values.values() if isinstance(v, StoredTensor)), COPY_AGAIN)
    if problems:
        raise CheckpointError(problems)
    return values


@dataclass(frozen=True, slots=True)
class _Bytes:
    """The bytes of a file that hold one zip."""

    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of the state dict: boxes side by side with the places of their bytes; an object has no boxes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    regions: tuple[_Bytes, ...]


def _entries(metadata: Any) -> tuple[list[_Entry], dict[str, _Path]]:
    """What ``.metadata`` says. Raises all that Python raises where it is not what DCP writes."""
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
    return entries, {entry.name: _checked(paths.get(entry.name) or _split(entry.name)) for entry in entries}


def _offset(key: Any) -> tuple[int, ...] | None:
    offset = getattr(key, "offset", None)
    return None if offset is None else _numbers(offset)


def _region(value: Any) -> _Bytes:
    if not isinstance(value, Region):
        raise TypeError(f"a place of bytes is a {type(value).__name__}")
    if getattr(value, "transform_descriptors", None):
        raise ValueError(f"its bytes are transformed by {value.transform_descriptors}")
    (start, length) = _numbers((value.offset, value.length))
    return _Bytes(str(value.relative_path), start, length)


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{numbers} where sizes are expected")
    return numbers


def _checked(path: Any) -> _Path:
    if not all(isinstance(part, (str, int)) for part in path):
        raise TypeError(f"the path {path}")
    return tuple(path)


def _split(name: str) -> _Path:
    """The path of an entry whose planner left none: only the top key is told apart."""
    top, _, rest = name.partition(".")
    return (top, rest) if top in ("model", "optimizer") and rest else (name,)


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    relative: str
    """To the checkpoint."""
    descriptor: int
    size: int


def _open(root: Path, folder: Path, names: set[str], stack: ExitStack) -> dict[str, _File]:
    problems: list[Problem] = []
    files: dict[str, _File] = {}
    for name in sorted(names):
        try:
            path = file_inside(folder, name, folder / DCP_METADATA)
        except CheckpointError as error:
            problems += error.problems
            continue
        descriptor = os.open(path, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        files[name] = _File(path, path.relative_to(root).as_posix(), descriptor, os.fstat(descriptor).st_size)
    if problems:
        raise CheckpointError(problems)
    return files


def _value(entry: _Entry, files: dict[str, _File], zips: TensorZips) -> Any:
    if entry.dtype:
        return StoredTensor(entry.name, entry.dtype, entry.shape, unreplicated(_pieces(entry, files, zips)))
    region = entry.regions[0]
    file = _file_of(region, files)
    value, offset = zips.read(file.descriptor, region.start, region.length, file.path)
    if not isinstance(value, PickledTensor):
        return value
    piece = StoredPiece(whole(value.shape), file.relative, offset, value.strides)
    return StoredTensor(entry.name, value.dtype, value.shape, unreplicated([piece]))


def _pieces(entry: _Entry, files: dict[str, _File], zips: TensorZips) -> Iterator[StoredPiece]:
    for box, region in zip(entry.boxes, entry.regions, strict=True):
        file = _file_of(region, files)
        tensor, offset = zips.read(file.descriptor, region.start, region.length, file.path)
        if not isinstance(tensor, PickledTensor) or (tensor.dtype, tensor.shape) != (entry.dtype, box.sizes):
            held = f"{tensor.dtype} {tensor.shape}" if isinstance(tensor, PickledTensor) else type(tensor).__name__
            refuse(
                file.path,
                f"at byte {region.start} it holds {held} where .metadata promises {entry.dtype} {box.sizes} of "
                f"{entry.name!r}.",
                "The files are of different checkpoints: copy this one again, whole.",
            )
        yield StoredPiece(box, file.relative, offset, tensor.strides)


def _file_of(region: _Bytes, files: dict[str, _File]) -> _File:
    file = files[region.file]
    if region.start + region.length > file.size:
        refuse(
            file.path,
            f"{file.size} bytes long, where .metadata places bytes {region.start} to {region.start + region.length}.",
            COPY_AGAIN,
        )
    return file
