"""The table of checkpoint formats, and functions that read a checkpoint of any format.

They read headers and metadata only, not the bytes of tensors. They do not import torch, and do not execute pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.errors import read_errors_as_problems, refuse
from hf_fsdp_plugin.checkpoint.file_io import object_in
from hf_fsdp_plugin.checkpoint.formats import dcp, safetensors, torch_files
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import StoredModel, StoredOptimizer, StoredState
from hf_fsdp_plugin.spec.fsdp_spec import StateDictKind


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """One way to store a model and an optimizer.

    Attributes:
        name: the value of ``format`` in ``inspect --json``.
        state_dict_type: the ``fsdp_state_dict_type`` that it stores. In a format of the type ``full``, parameters have
            the names that ``save_pretrained`` writes, which can differ from those of the modules.
        read: (checkpoint, ``FSDP_MODEL`` or ``OPTIMIZER``, number of the model or optimizer) -> its state dict;
            ``None`` if it is not stored in this format.
        model_files: glob patterns, relative to the checkpoint, of the files that identify the format. ``{number}`` is
            the number of the model, ``{suffix}`` is ``_{number}`` and empty for model 0.
    """

    name: str
    state_dict_type: StateDictKind
    read: Callable[[Path, str, int], StoredState | None]
    model_files: tuple[str, ...]

    def patterns(self, number: int) -> list[str]:
        """Return ``model_files`` for the model with this number."""
        return [file.format(number=number, suffix=f"_{number}" if number else "") for file in self.model_files]


def _with_index(name: str) -> tuple[str, str]:
    """Return the name of a model file, and the name of its index if it was split."""
    return name, file_names.index_file(name)


_FSDP = file_names.FSDP_MODEL
_HF = file_names.safetensors_file(f"{file_names.HF_MODEL}{{suffix}}")
_BIN = f"{file_names.HF_MODEL_BIN}{{suffix}}.bin"
_ADAPTER = file_names.safetensors_file(file_names.ADAPTER)
_RANK_FILES = f"{_FSDP}_{{number}}_rank*.bin", f"{_FSDP}{{suffix}}_rank*.bin"
DEEPSPEED_FILES: Final = "*mp_rank_00_model_states.pt"
"""The files of DeepSpeed with a model, in the folder of a tag."""
_DEEPSPEED = f"*/{DEEPSPEED_FILES}", DEEPSPEED_FILES


def refuse_deepspeed(checkpoint: Path, *_: object) -> None:
    """Raise a ``CheckpointError`` with the command that converts it, if a folder is a checkpoint of DeepSpeed."""
    if (checkpoint / file_names.MANIFEST_NAME).is_file():  # this package has written another one into the folder
        return
    if any(True for pattern in _DEEPSPEED for _ in checkpoint.glob(pattern)):
        here = checkpoint.absolute()
        converted = here.with_name(f"{here.name}-fsdp")
        fix = f"Convert it with `hf-fsdp convert {here} --out {converted}`, and use {converted}."
        refuse("FSDP-E417", checkpoint, "is a checkpoint of DeepSpeed, which has to be converted first.", fix)


FORMATS: Final = (
    CheckpointFormat("dcp", "sharded", dcp.read_state, (f"{_FSDP}_{{number}}/{file_names.DCP_METADATA}",)),
    # before the 16-bit weights that the Trainer writes beside DeepSpeed's files
    CheckpointFormat("deepspeed", "sharded", refuse_deepspeed, _DEEPSPEED),
    CheckpointFormat("full", "full", safetensors.read_model, _with_index(_HF)),
    CheckpointFormat("bin", "full", torch_files.read_bin, (f"{_FSDP}{{suffix}}.bin", *_with_index(_BIN))),
    CheckpointFormat("per_rank", "sharded", torch_files.read_per_rank, _RANK_FILES),
    CheckpointFormat("full", "full", safetensors.read_adapter, _with_index(_ADAPTER)),
    # after a single file, which may be made of the shards in the same folder
    CheckpointFormat("hf_shards", "sharded", safetensors.read_shards, safetensors.SHARD_PATTERNS),
)
"""All formats, in the order in which a checkpoint is searched for them. Rows with equal names differ in file names."""


def format_named(name: str) -> CheckpointFormat:
    return next(form for form in FORMATS if form.name == name)


def stored_state_dict_type(checkpoint: Path) -> StateDictKind | None:
    """Return the state dict type of the first model in a folder, by its file names; ``None`` if there is none.

    The manifest distinguishes ``local`` from ``sharded``, because their files are the same.
    """
    for form in FORMATS:
        if any(True for pattern in form.patterns(0) for _ in checkpoint.glob(pattern)):
            is_local = form.name == "dcp" and object_in(checkpoint / file_names.MANIFEST_NAME).get("kind") == "local"
            return "local" if is_local else form.state_dict_type
    return None


def read_stored_model(checkpoint: Path, number: int = 0) -> StoredModel:
    """Return the model of a checkpoint, in the first format found.

    Args:
        checkpoint: a checkpoint's folder, its ``pytorch_model_fsdp_{number}``, or a Hugging Face folder.
        number: index of the model, for runs that train several models.

    Raises:
        CheckpointError: there is no model, or it is incomplete, damaged or unsafe to read.
    """
    with _os_errors_as_problems(checkpoint):
        for form in FORMATS:
            if (state := form.read(checkpoint, file_names.FSDP_MODEL, number)) is not None:
                return state.checked(state.as_model(checkpoint, form.name))
    patterns = dict.fromkeys(pattern for form in FORMATS for pattern in form.patterns(number))
    message = f"does not contain the weights of a model; none of these files exists: {', '.join(patterns)}."
    refuse("FSDP-E451", checkpoint, message, "Give the folder of a checkpoint or of a saved model.")


def read_stored_optimizer(checkpoint: Path, number: int = 0) -> StoredOptimizer | None:
    """Return the optimizer of a checkpoint (or of its ``optimizer_{number}``), or ``None`` if there is none.

    Raises:
        CheckpointError: the folder does not exist, or the optimizer is incomplete, damaged or unsafe to read.
    """
    with _os_errors_as_problems(checkpoint):
        for form in FORMATS:
            if (state := form.read(checkpoint, file_names.OPTIMIZER, number)) is not None:
                return state.checked(state.as_optimizer(checkpoint, form.name))
    return None


@contextmanager
def _os_errors_as_problems(checkpoint: Path) -> Iterator[None]:
    """Raise a ``CheckpointError`` if the checkpoint is not a folder, or if a file in it cannot be opened."""
    if not checkpoint.exists():
        refuse("FSDP-E450", checkpoint, "does not exist.", "Give the folder of a checkpoint.")
    if not checkpoint.is_dir():
        refuse("FSDP-E450", checkpoint, "is not a folder.", f"Give the folder of the checkpoint: {checkpoint.parent}.")
    with read_errors_as_problems(checkpoint):
        yield
