"""Files of ``torch.save``: a whole state dict in one (``bin``), or the parts of each rank in its own (``per_rank``)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hf_fsdp_plugin.checkpoint.formats.boxes import Box, whole
from hf_fsdp_plugin.checkpoint.formats.nested import optimizer_parts
from hf_fsdp_plugin.checkpoint.formats.pickles import Distributed, PickledTensor
from hf_fsdp_plugin.checkpoint.formats.rank_parts import parts_of
from hf_fsdp_plugin.checkpoint.formats.safetensors_files import MAX_SHOWN, shards_of
from hf_fsdp_plugin.checkpoint.formats.stored import (
    COPY_AGAIN,
    StoredModel,
    StoredOptimizer,
    StoredPiece,
    StoredTensor,
    problem,
    refuse,
    uncovered_problems,
    unreplicated,
)
from hf_fsdp_plugin.checkpoint.formats.torch_zip import TorchZip
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import CheckpointError

FLAT_PARAMETER = "flat_param"
"""The end of the names that only FSDP1's own state dict has."""

_ALL_RANKS = "Copy the files of all ranks, which may lie on other machines, into one folder."


def read_bin_model(root: Path, name: str) -> StoredModel | None:
    """The model in the file ``name``, or in the shards that its index lists; ``None`` without them."""
    listed = root / f"{name}.index.json"
    if (root / name).is_file():
        names = [name]
    elif listed.is_file():
        names = list(shards_of(root, listed))
    else:
        return None
    tensors, objects = _model_entries(_read(root, names))
    return StoredModel(root, "bin", tensors, objects)


def read_bin_optimizer(root: Path, name: str) -> StoredOptimizer | None:
    """The optimizer in the file ``name``, or ``None`` without it."""
    if not (root / name).is_file():
        return None
    state, groups = optimizer_parts(_read(root, [name]), root, root / name)
    return StoredOptimizer(root, "bin", state, groups)


def read_rank_models(root: Path, prefix: str) -> StoredModel | None:
    """The model in ``{prefix}_rank{R}.bin`` of all ranks, or ``None`` without such files."""
    names = _rank_files(root, prefix)
    if not names:
        return None
    state = _read(root, names)
    tensors, objects = _model_entries(state)
    _covered(root / f"{prefix}_rank*.bin", names, tensors.values())
    return StoredModel(root, "per_rank", tensors, objects)


def read_rank_optimizers(root: Path, prefix: str) -> StoredOptimizer | None:
    """The optimizer in ``{prefix}_rank{R}.bin`` of all ranks, or ``None`` without such files."""
    names = _rank_files(root, prefix)
    if not names:
        return None
    state, groups = optimizer_parts(_read(root, names), root, root / names[0])
    found = (value for entry in state.values() for value in entry.values() if isinstance(value, StoredTensor))
    _covered(root / f"{prefix}_rank*.bin", names, found)
    return StoredOptimizer(root, "per_rank", state, groups)


def _covered(place: Path, names: list[str], tensors: Iterable[StoredTensor]) -> None:
    problems = uncovered_problems(place, tensors, f"Found are {', '.join(names)}. {_ALL_RANKS}")
    if problems:
        raise CheckpointError(problems)


def _rank_files(root: Path, prefix: str) -> list[str]:
    """The files of all ranks, in their order. Raises for those missing before the last that is there."""
    pattern = re.compile(rf"{re.escape(prefix)}_rank(\d{{1,7}})\.bin")
    ranks = {int(match[1]) for path in root.iterdir() if (match := pattern.fullmatch(path.name))}
    missing = [rank for rank in range(max(ranks, default=0)) if rank not in ranks]
    if missing:
        raise CheckpointError(
            problem(root / f"{prefix}_rank{rank}.bin", "missing, where files of later ranks are there.", _ALL_RANKS)
            for rank in missing[:MAX_SHOWN]
        )
    return [f"{prefix}_rank{rank}.bin" for rank in sorted(ranks)]


def _model_entries(state: dict[Any, Any]) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Any] = {}
    for key, value in state.items():
        name = canonical_name(str(key))
        if isinstance(value, StoredTensor):
            tensors[name] = StoredTensor(name, value.dtype, value.shape, value.pieces)
        else:
            objects[name] = value
    return tensors, objects


class _File(NamedTuple):
    path: Path
    relative: str
    zip: TorchZip


def _read(root: Path, names: list[str]) -> dict[Any, Any]:
    """The state dicts of all files as one, with a stored tensor where any of them has a part of one."""
    with ExitStack() as stack:
        found: list[tuple[_File, Any]] = []
        for name in names:
            path = root / name
            descriptor = os.open(path, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            zipped = TorchZip(descriptor, 0, os.fstat(descriptor).st_size, path)
            value = zipped.value()
            if not isinstance(value, dict):
                refuse(path, f"it holds a {type(value).__name__} where a state dict is expected.", COPY_AGAIN)
            if any(str(key).endswith(FLAT_PARAMETER) for key in value):
                _refuse_flat(path)
            found.append((_File(path, name, zipped), value))
        try:
            return _merged("", found)
        except (AttributeError, KeyError, TypeError, ValueError, IndexError, ArithmeticError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            refuse(
                root / names[0],
                f"not what torch 2.13 writes of a state dict ({type(error).__name__}: {error}).",
                "Save it again with fsdp_state_dict_type: SHARDED_STATE_DICT and use_dcp=True.",
            )


def _refuse_flat(path: Path) -> NoReturn:
    refuse(
        path,
        "FSDP1's LOCAL_STATE_DICT: flat parameters, whose cutting into names and shapes only the run that wrote them "
        "knows.",
        "Load it with the script and the number of ranks that wrote it, and save with "
        "fsdp_state_dict_type: SHARDED_STATE_DICT.",
    )


def _merged(name: str, found: list[tuple[_File, Any]]) -> Any:
    """One value from those that several files have in one place; plain values are the first file's."""
    file, first = found[0]
    if isinstance(first, dict):
        keys = {key: None for _, value in found for key in value}
        return {key: _merged(str(key), [(f, value[key]) for f, value in found if key in value]) for key in keys}
    if isinstance(first, list):
        return [_merged(name, [(file, item)]) for item in first]
    if not isinstance(first, (PickledTensor, Distributed)):
        return first
    shape, dtype = None, None
    pieces = []
    for file, value in found:
        whole_shape, parts = _boxes(value)
        if shape not in (None, whole_shape):
            raise ValueError(f"{name!r} has the shape {whole_shape} in {file.relative} and {shape} before")
        shape = whole_shape
        for box, tensor in parts:
            dtype = dtype or tensor.dtype
            pieces.append(StoredPiece(box, file.relative, file.zip.tensor_offset(tensor), tensor.strides))
    return StoredTensor(name, dtype or "float32", shape or (), unreplicated(pieces))


def _boxes(value: PickledTensor | Distributed) -> tuple[tuple[int, ...], list[tuple[Box, PickledTensor]]]:
    if isinstance(value, PickledTensor):
        return value.shape, [(whole(value.shape), value)]
    return parts_of(value)
