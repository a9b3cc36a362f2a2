"""Where every tensor of a checkpoint lies, for every format that this package, Accelerate or the Trainer writes.

An index is read from headers and metadata alone: no tensor's bytes, no torch, and nothing that a pickle names is run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hf_fsdp_plugin.checkpoint.formats.dcp import read_dcp_model, read_dcp_optimizer
from hf_fsdp_plugin.checkpoint.formats.safetensors_files import read_full_model, read_local_model, read_local_optimizer
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel, StoredOptimizer, refuse
from hf_fsdp_plugin.checkpoint.formats.torch_saves import (
    read_bin_model,
    read_bin_optimizer,
    read_rank_models,
    read_rank_optimizers,
)
from hf_fsdp_plugin.checkpoint.names import (
    ADAPTER,
    DCP_METADATA,
    DCP_SUFFIX,
    FSDP_MODEL,
    HF_MODEL,
    HF_MODEL_BIN,
    OPTIMIZER,
    local_folder,
    numbered,
    numbered_from_one,
    safetensors_file,
)


def read_stored_model(checkpoint: Path, number: int = 0) -> StoredModel:
    """The model of a checkpoint, in the first format found.

    Args:
        checkpoint: a checkpoint's folder, its ``pytorch_model_fsdp_{number}``, or a Hugging Face folder.
        number: which of the models that one run trains.

    Raises:
        CheckpointError: there is no model, or it is incomplete, damaged or hostile.
    """
    _check_folder(checkpoint)
    dcp_folder, model = numbered(FSDP_MODEL, number), numbered_from_one(FSDP_MODEL, number)
    safetensors = safetensors_file(numbered_from_one(HF_MODEL, number))
    bins, adapter = f"{numbered_from_one(HF_MODEL_BIN, number)}.bin", safetensors_file(ADAPTER)
    candidates: dict[str, Callable[[], StoredModel | None]] = {
        f"{dcp_folder}/{DCP_METADATA}": lambda: _dcp_model(checkpoint, number),
        f"{local_folder(FSDP_MODEL)}/{number}_rank*.safetensors": lambda: read_local_model(checkpoint, number),
        f"{safetensors} (or its .index.json)": lambda: read_full_model(checkpoint, safetensors),
        f"{model}.bin": lambda: read_bin_model(checkpoint, f"{model}.bin"),
        f"{bins} (or its .index.json)": lambda: read_bin_model(checkpoint, bins),
        f"{dcp_folder}_rank*.bin": lambda: read_rank_models(checkpoint, dcp_folder),
        f"{model}_rank*.bin": lambda: read_rank_models(checkpoint, model),
        adapter: lambda: read_full_model(checkpoint, adapter),
    }
    for read in candidates.values():
        index = read()
        if index is not None:
            return index
    refuse(
        checkpoint,
        f"no model's weights in it; looked for {', '.join(candidates)}.",
        "Name a checkpoint's folder, or the folder of a saved model.",
    )


def read_stored_optimizer(checkpoint: Path, number: int = 0) -> StoredOptimizer | None:
    """The optimizer of a checkpoint (or of its ``optimizer_{number}``), or ``None`` where it has none.

    Raises:
        CheckpointError: the folder is none, or the optimizer is incomplete, damaged or hostile.
    """
    _check_folder(checkpoint)
    return (
        _dcp_optimizer(checkpoint, number)
        or read_local_optimizer(checkpoint, number)
        or read_bin_optimizer(checkpoint, f"{numbered_from_one(OPTIMIZER, number)}.bin")
        or read_rank_optimizers(checkpoint, numbered(OPTIMIZER, number))
    )


def _dcp_model(checkpoint: Path, number: int) -> StoredModel | None:
    folder = _dcp_folder(checkpoint, numbered(FSDP_MODEL, number))
    return read_dcp_model(checkpoint, folder) if folder is not None else None


def _dcp_optimizer(checkpoint: Path, number: int) -> StoredOptimizer | None:
    folder = _dcp_folder(checkpoint, numbered(OPTIMIZER, number))
    return read_dcp_optimizer(checkpoint, folder) if folder is not None else None


def _dcp_folder(checkpoint: Path, name: str) -> Path | None:
    """``checkpoint`` itself or the folder ``name`` in it, whichever holds ``.metadata``."""
    for folder in (checkpoint, checkpoint / name):
        if (folder / DCP_METADATA).is_file():
            return folder
        if folder.is_dir() and any(folder.glob(f"*{DCP_SUFFIX}")):
            refuse(
                folder,
                f"it has no {DCP_METADATA}: its writing was broken off, or it was copied without hidden files.",
                "Use an earlier checkpoint, or copy this one again, whole.",
            )
    return None


def _check_folder(checkpoint: Path) -> None:
    if not checkpoint.exists():
        refuse(checkpoint, "there is no such folder.", "Name a checkpoint's folder.")
    if not checkpoint.is_dir():
        refuse(checkpoint, "a file, where a checkpoint's folder is expected.", f"Name its folder, {checkpoint.parent}.")
