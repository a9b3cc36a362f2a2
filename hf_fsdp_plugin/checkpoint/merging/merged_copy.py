"""The merged copy of a checkpoint for ``from_pretrained``, which cannot read weights in shards."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Final

from hf_fsdp_plugin.checkpoint.formats.errors import problem
from hf_fsdp_plugin.checkpoint.formats.hashing import hash_bytes
from hf_fsdp_plugin.checkpoint.formats.table import stored_state_dict_type
from hf_fsdp_plugin.checkpoint.merging.merge import merge
from hf_fsdp_plugin.checkpoint.merging.options import MergeOptions
from hf_fsdp_plugin.checkpoint.names import (
    DCP_METADATA,
    FSDP_MODEL,
    HF_MODEL,
    HF_MODEL_BIN,
    index_file,
    merged_copies,
    merged_copy,
    numbered,
    safetensors_file,
)
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import CheckpointError, Problem

_IN_USE: Final = "FSDP-E485"
_POLL_INTERVAL: Final = 0.2
_READABLE: Final = (
    *(name for file in (safetensors_file(HF_MODEL), f"{HF_MODEL_BIN}.bin") for name in (file, index_file(file))),
    "adapter_config.json",
)
"""Files of which ``from_pretrained`` reads the weights, or learns that they are those of an adapter."""


def with_whole_weights(folder: Path) -> Path:
    """Return a folder that ``from_pretrained`` can read: a merged copy if the weights of ``folder`` are in shards only.

    The copy is a hidden folder next to the checkpoint, which later calls use, and which is removed with the checkpoint.
    One process writes it, and the others wait. No communication.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete, or the copy cannot be written.
    """
    if any((folder / name).exists() for name in _READABLE):
        return folder
    if not folder.is_dir() or stored_state_dict_type(folder) not in ("sharded", "local"):
        return folder
    copy = merged_copy(folder, _state_of(folder))
    if not copy.is_dir():
        message = f"from_pretrained cannot read the shards of {folder}: they are merged into {copy}, which it reads."
        fix = "For a folder that can be moved, use `hf-fsdp export`; save_only_model=True writes whole weights."
        print_once(Problem(code="FSDP-N436", message=message, fix=fix))
    while not copy.is_dir():
        try:
            _write(folder, copy)
        except CheckpointError as error:
            if not copy.is_dir() and any(each.code != _IN_USE for each in error.problems):
                raise
            time.sleep(_POLL_INTERVAL)  # another process is writing the copy, or has just written it
    return copy


def _state_of(folder: Path) -> str:
    """Return a hash that changes when the weights of a checkpoint are written again."""
    model = folder / numbered(FSDP_MODEL, 0)
    paths = [model, model / DCP_METADATA]
    return hash_bytes(repr([path.stat().st_mtime_ns for path in paths if path.exists()]).encode())[:12]


def _write(folder: Path, copy: Path) -> None:
    try:
        merge(folder, copy, MergeOptions())
    except OSError as error:
        message = (
            f"cannot be written, so from_pretrained cannot read the shards of {folder}: {error.strerror or error}."
        )
        fix = f"Run `hf-fsdp merge {folder} OUT`, with OUT on another disk, and pass OUT to from_pretrained."
        raise CheckpointError([problem("FSDP-E437", copy, message, fix)]) from error
    for old in merged_copies(folder):
        if old != copy:
            shutil.rmtree(old, ignore_errors=True)
