"""The table of checkpoint formats, and functions that read a checkpoint of any format.

They read headers and metadata only, not the bytes of tensors. They do not import torch, and do not execute pickles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from hf_fsdp_plugin.checkpoint.errors import refuse
from hf_fsdp_plugin.checkpoint.formats import dcp
from hf_fsdp_plugin.checkpoint.formats.boxes import dtype_size, numpy_dtype, whole_box
from hf_fsdp_plugin.checkpoint.formats.safetensors import ADAPTER_FORMAT, FULL_FORMAT, read_safetensors
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import (
    CheckpointFormat,
    PieceTable,
    StoredModel,
    StoredOptimizer,
    StoredState,
    StoredTensor,
    labelled_tensors,
)
from hf_fsdp_plugin.checkpoint.formats.torch_files import BIN_FORMAT, PER_RANK_FORMAT
from hf_fsdp_plugin.checkpoint.io import object_in, read_range
from hf_fsdp_plugin.checkpoint.names import FSDP_MODEL, MANIFEST_NAME, OPTIMIZER
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.spec.fsdp_spec import StateDictKind
from hf_fsdp_plugin.text import format_names, plural

FORMATS: Final[tuple[CheckpointFormat, ...]] = (dcp.FORMAT, FULL_FORMAT, BIN_FORMAT, PER_RANK_FORMAT, ADAPTER_FORMAT)
"""All formats, in the order in which a checkpoint is searched for them. Rows with equal names differ in file names."""


def format_named(name: str) -> CheckpointFormat:
    return next(form for form in FORMATS if form.name == name)


def stored_state_dict_type(checkpoint: Path) -> StateDictKind | None:
    """Return the state dict type of the first model in a folder, by its file names; ``None`` if there is none.

    The manifest distinguishes ``local`` from ``sharded``, because their files are the same.
    """
    for form in FORMATS:
        if any(True for pattern in form.patterns(0) for _ in checkpoint.glob(pattern)):
            is_local = form is dcp.FORMAT and object_in(checkpoint / MANIFEST_NAME).get("kind") == "local"
            return "local" if is_local else form.state_dict_type
    return None


def read_stored_model(checkpoint: Path, number: int = 0, *, partial: bool = False) -> StoredModel:
    """Return the model of a checkpoint, in the first format found.

    Args:
        checkpoint: a checkpoint's folder, its ``pytorch_model_fsdp_{number}``, or a Hugging Face folder.
        number: index of the model, for runs that train several models.
        partial: the caller needs a part of the elements: what is not needed may be missing or damaged.

    Raises:
        CheckpointError: there is no model, or it is incomplete, damaged or unsafe to read.
    """
    with _os_errors_as_problems(checkpoint):
        for form in FORMATS:
            if (state := form.read(checkpoint, FSDP_MODEL, number)) is not None:
                return _checked(_as_model(checkpoint, form.name, state), state, partial=partial)
    patterns = dict.fromkeys(pattern for form in FORMATS for pattern in form.patterns(number))
    refuse(
        "FSDP-E451",
        checkpoint,
        f"does not contain the weights of a model; none of these files exists: {', '.join(patterns)}.",
        "Give the folder of a checkpoint or of a saved model.",
    )


def read_stored_optimizer(checkpoint: Path, number: int = 0, *, partial: bool = False) -> StoredOptimizer | None:
    """Return the optimizer of a checkpoint (or of its ``optimizer_{number}``), or ``None`` if there is none.

    Args:
        partial: as in :func:`read_stored_model`.

    Raises:
        CheckpointError: the folder does not exist, or the optimizer is incomplete, damaged or unsafe to read.
    """
    with _os_errors_as_problems(checkpoint):
        for form in FORMATS:
            if (state := form.read(checkpoint, OPTIMIZER, number)) is not None:
                parts = optimizer_parts(nested_value(state.entries), checkpoint, state.place)
                stored = StoredOptimizer(checkpoint, form.name, *parts, state.files)
                return _checked(stored, state, partial=partial)
    return None


def read_weights(folder: Path, name: str) -> StoredModel | None:
    """Return the tensors in the safetensors file ``name``, or in the shards that its index lists.

    Returns ``None`` if neither exists. Raises the errors of :func:`read_stored_model`.
    """
    with _os_errors_as_problems(folder):
        state = read_safetensors(folder, name)
    return None if state is None else _as_model(folder, FULL_FORMAT.name, state)


def _as_model(root: Path, form: str, state: StoredState) -> StoredModel:
    """Return the entries by canonical name. The name of an entry is the path to it, joined with dots."""
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Any] = {}
    for path, value in state.entries.items():
        name = canonical_name(".".join(map(str, path)))
        if isinstance(value, StoredTensor):
            tensors[name] = replace(value, name=name)
        else:
            objects[name] = value
    return StoredModel(root, form, tensors, state.files, objects)


def nested_value(entries: Mapping[tuple[Any, ...], Any]) -> Any:
    """Nest flattened entries: ``{("a", 0, "b"): 1}`` -> ``{"a": [{"b": 1}]}``. Numbers in a path are list indices."""
    if () in entries:
        return entries[()]
    branches: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for path, value in entries.items():
        branches.setdefault(path[0], {})[path[1:]] = value
    if branches and all(isinstance(key, int) for key in branches):
        return [nested_value(branches[key]) for key in sorted(branches)]
    return {key: nested_value(branch) for key, branch in branches.items()}


def optimizer_parts(
    value: Any, root: Path, place: Path
) -> tuple[dict[str, dict[str, StoredTensor | Any]], list[dict[str, Any]]]:
    """Return the state by parameter and the parameter groups of an optimizer's state dict.

    An optimizer without FSDP numbers its parameters. The numbers are then used as names.

    Raises:
        CheckpointError: the value is not an optimizer's state dict.
    """
    state: dict[str, dict[str, StoredTensor | Any]] = {}
    try:
        for parameter, entry in value.get("state", {}).items():
            name = canonical_name(str(parameter))
            state[name] = {
                key: replace(item, name=name) if isinstance(item, StoredTensor) else item for key, item in entry.items()
            }
        return state, [_group(group, root) for group in value.get("param_groups", [])]
    except (AttributeError, TypeError):
        message = "is not an optimizer's state dict: it does not contain a dict 'state' and a list 'param_groups'."
        refuse("FSDP-E461", place, message, "Give a checkpoint that Accelerate, the Trainer or this package wrote.")


def _group(group: Any, root: Path) -> dict[str, Any]:
    plain = {key: _number(item, root) if isinstance(item, StoredTensor) else item for key, item in group.items()}
    return {**plain, "params": [canonical_name(str(name)) for name in group.get("params", [])]}


def _number(tensor: StoredTensor, root: Path) -> Any:
    """Return the value of a scalar tensor, such as a learning rate; other tensors are returned unchanged."""
    if whole_box(tensor.shape).numel != 1 or tensor.dtype != str(numpy_dtype(tensor.dtype)):
        return tensor
    import numpy

    piece = tensor.within(whole_box(tensor.shape))[0]
    data = read_range(root / piece.file, piece.offset, dtype_size(tensor.dtype))
    return numpy.frombuffer(data, numpy_dtype(tensor.dtype))[0].item()


_Stored = TypeVar("_Stored", StoredModel, StoredOptimizer)


def _checked(stored: _Stored, state: StoredState, *, partial: bool) -> _Stored:
    """Return ``stored`` if every element of its tensors is in a file.

    Args:
        partial: do not check the tensors whose pieces are read when they are needed, and checked then.
    """
    missing = {
        label: count
        for label, tensor in labelled_tensors(stored)
        if not (partial and isinstance(tensor.pieces, PieceTable)) and (count := tensor.uncovered())
    }
    if missing:
        amount = f"{plural(sum(missing.values()), 'element')} of {plural(len(missing), 'tensor')}"
        message = f"{amount} are in none of the files: {format_names(missing, 3)}."
        refuse("FSDP-E458", state.place, message, state.fix)
    return stored


@contextmanager
def _os_errors_as_problems(checkpoint: Path) -> Iterator[None]:
    """Raise a ``CheckpointError`` if the checkpoint is not a folder, or if a file in it cannot be opened."""
    if not checkpoint.exists():
        refuse("FSDP-E450", checkpoint, "does not exist.", "Give the folder of a checkpoint.")
    if not checkpoint.is_dir():
        refuse("FSDP-E450", checkpoint, "is not a folder.", f"Give the folder of the checkpoint: {checkpoint.parent}.")
    try:
        yield
    except OSError as error:  # a file cannot be opened, or is not a file
        refuse("FSDP-E472", error.filename or checkpoint, f"cannot be read: {error.strerror or error}.")
