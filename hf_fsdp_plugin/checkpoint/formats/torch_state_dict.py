"""Reads state dicts from one file of ``torch.save``, or from one file per rank with its parts of the tensors."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from hf_fsdp_plugin.checkpoint.formats.boxes import Box, whole
from hf_fsdp_plugin.checkpoint.formats.errors import refuse
from hf_fsdp_plugin.checkpoint.formats.pickles import Distributed, PickledTensor
from hf_fsdp_plugin.checkpoint.formats.rank_parts import parts_of
from hf_fsdp_plugin.checkpoint.formats.stored import StoredPiece, StoredTensor, without_replicas
from hf_fsdp_plugin.checkpoint.formats.torch_zip import TorchZip
from hf_fsdp_plugin.checkpoint.io import open_regular
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import CheckpointError

FLAT_PARAMETER = "flat_param"
"""Suffix of the names in a local state dict of FSDP1."""


_FLAT = "is a LOCAL_STATE_DICT of stock FSDP1, which lacks the names and shapes of the original parameters."
_FLAT_FIX = (
    "Load it with the script and the number of ranks that wrote it, and save it with fsdp_state_dict_type: "
    "SHARDED_STATE_DICT."
)


class _File(NamedTuple):
    relative: str
    zip: TorchZip


def read_state_dict(root: Path, names: list[str]) -> dict[Any, Any]:
    """Merge the state dicts of all files into one, with a :class:`StoredTensor` for each tensor."""
    with ExitStack() as stack:
        found: list[tuple[_File, Any]] = []
        for name in names:
            path = root / name
            descriptor = open_regular(path)
            stack.callback(os.close, descriptor)
            zipped = TorchZip(descriptor, 0, os.fstat(descriptor).st_size, path)
            value = zipped.value()
            if not isinstance(value, dict):
                refuse("FSDP-E460", path, f"contains a {type(value).__name__} instead of a state dict.")
            if any(str(key).endswith(FLAT_PARAMETER) for key in value):
                refuse("FSDP-E460", path, _FLAT, _FLAT_FIX)
            found.append((_File(name, zipped), value))
        try:
            return _merge("", found)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, ArithmeticError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            message = f"is not a state dict in the form that torch 2.13 writes ({type(error).__name__}: {error})."
            fix = "Save it again with fsdp_state_dict_type: SHARDED_STATE_DICT and use_dcp=True."
            refuse("FSDP-E460", root / names[0], message, fix)


def model_entries(state: dict[Any, Any]) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Split a model's state dict into tensors and other values, by canonical name."""
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Any] = {}
    for key, value in state.items():
        name = canonical_name(str(key))
        if isinstance(value, StoredTensor):
            tensors[name] = StoredTensor(name, value.dtype, value.shape, value.pieces)
        else:
            objects[name] = value
    return tensors, objects


def _merge(name: str, found: list[tuple[_File, Any]]) -> Any:
    """Merge the values of one name from several files. A value that is not a tensor is taken from the first file."""
    file, first = found[0]
    if isinstance(first, dict):
        keys = {key: None for _, value in found for key in value}
        return {key: _merge(str(key), [(f, value[key]) for f, value in found if key in value]) for key in keys}
    if isinstance(first, list):
        return [_merge(name, [(file, item)]) for item in first]
    if not isinstance(first, (PickledTensor, Distributed)):
        return first
    shape, dtype = None, None
    pieces = []
    for file, value in found:
        global_shape, parts = _boxes(value)
        if shape not in (None, global_shape):
            raise ValueError(f"{name!r} has the shape {global_shape} in {file.relative} and {shape} in another file")
        shape = global_shape
        for box, tensor in parts:
            dtype = dtype or tensor.dtype
            pieces.append(StoredPiece(box, file.relative, file.zip.tensor_offset(tensor), tensor.strides))
    return StoredTensor(name, dtype or "float32", shape or (), without_replicas(pieces))


def _boxes(value: PickledTensor | Distributed) -> tuple[tuple[int, ...], list[tuple[Box, PickledTensor]]]:
    if isinstance(value, PickledTensor):
        return value.shape, [(whole(value.shape), value)]
    return parts_of(value)
