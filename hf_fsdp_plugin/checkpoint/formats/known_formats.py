"""The table of checkpoint formats, and functions that read a checkpoint of any format.

They read headers and metadata only, not the bytes of tensors. They do not import torch, and do not execute pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

from hf_fsdp_plugin.checkpoint.errors import raise_if_any, refuse
from hf_fsdp_plugin.checkpoint.formats import dcp
from hf_fsdp_plugin.checkpoint.formats.safetensors import ADAPTER_FORMAT, FULL_FORMAT
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import (
    CheckpointFormat,
    PieceTable,
    StoredModel,
    StoredOptimizer,
    coverage_problems,
    labelled_tensors,
)
from hf_fsdp_plugin.checkpoint.formats.torch_files import BIN_FORMAT, PER_RANK_FORMAT
from hf_fsdp_plugin.checkpoint.io import object_in
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.spec.fsdp_spec import StateDictKind

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
    model = _first_stored(checkpoint, [form.read_model for form in FORMATS], number, partial=partial)
    if model is not None:
        return model
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
    readers = [form.read_optimizer for form in FORMATS if form.read_optimizer is not None]
    return _first_stored(checkpoint, readers, number, partial=partial)


_Stored = TypeVar("_Stored", StoredModel, StoredOptimizer)


def _first_stored(
    checkpoint: Path, readers: Iterable[Callable[[Path, int], _Stored | None]], number: int, *, partial: bool
) -> _Stored | None:
    """Return the first model or optimizer that a reader finds. Errors of the system become a ``CheckpointError``."""
    _check_folder(checkpoint)
    try:
        for read in readers:
            if (stored := read(checkpoint, number)) is not None:
                if not partial:  # check all pieces that are otherwise read when they are needed
                    tensors = [each for _, each in labelled_tensors(stored) if isinstance(each.pieces, PieceTable)]
                    raise_if_any(coverage_problems(stored.root, tensors))
                return stored
    except OSError as error:  # a file cannot be opened, or is not a file
        refuse("FSDP-E472", error.filename or checkpoint, f"cannot be read: {error.strerror or error}.")
    return None


def _check_folder(checkpoint: Path) -> None:
    if not checkpoint.exists():
        refuse("FSDP-E450", checkpoint, "does not exist.", "Give the folder of a checkpoint.")
    if not checkpoint.is_dir():
        refuse("FSDP-E450", checkpoint, "is not a folder.", f"Give the folder of the checkpoint: {checkpoint.parent}.")
