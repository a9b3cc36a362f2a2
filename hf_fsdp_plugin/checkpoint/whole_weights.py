"""The merged copy of a checkpoint with shards, which ``from_pretrained`` reads instead of it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from hf_fsdp_plugin.checkpoint import names as file_names
from hf_fsdp_plugin.checkpoint.errors import refuse
from hf_fsdp_plugin.checkpoint.formats.known_formats import stored_state_dict_type
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.problems import Problem

_WEIGHTS: Final = (file_names.safetensors_file(file_names.HF_MODEL), f"{file_names.HF_MODEL_BIN}.bin")
_READABLE: Final = (*_WEIGHTS, *map(file_names.index_file, _WEIGHTS), file_names.ADAPTER_CONFIG)
"""Files from which ``from_pretrained`` reads weights, or by which it recognizes an adapter."""


def with_whole_weights(folder: Path) -> Path:
    """Return a folder that ``from_pretrained`` can read: a merged copy if the weights of ``folder`` are in shards only.

    The copy is a hidden folder next to the checkpoint, which later calls use, and which is removed with the checkpoint.
    ``hf-fsdp merge`` writes it for the first process that needs it, and the others wait. No communication.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete, or the copy cannot be written.
    """
    if any((folder / name).exists() for name in _READABLE):
        return folder
    if not folder.is_dir() or stored_state_dict_type(folder) not in ("sharded", "local"):
        return folder
    metadata = folder / file_names.numbered_name(file_names.FSDP_MODEL, 0) / file_names.DCP_METADATA
    written = (metadata if metadata.exists() else folder).stat().st_mtime_ns  # other weights get another copy
    copy = file_names.hidden_path(folder, f"{file_names.MERGED}{written}")
    if copy.is_dir():
        return copy
    message = f"from_pretrained cannot read the shards of {folder}: they are merged into {copy}, which it reads."
    fix = "For a folder that can be moved, use `hf-fsdp export`; save_only_model=True writes whole weights."
    print_once(Problem(code="FSDP-N436", message=message, fix=fix))
    lock = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot lock a folder: then the merge reports another one
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not copy.is_dir():
            _merge(folder, copy)
    finally:
        os.close(lock)
    for old in file_names.merged_copies(folder):
        if old != copy:
            shutil.rmtree(old, ignore_errors=True)
    return copy


def _merge(folder: Path, copy: Path) -> None:
    """Merge a checkpoint in a child process: the tools are not a part of the training."""
    command = [sys.executable, "-m", "hf_fsdp_plugin.cli.main", "merge", str(folder), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=without_launcher())
    if done.returncode:
        why = done.stderr.strip() or f"the process returned {done.returncode}"
        message = f"cannot be written, so from_pretrained cannot read the shards of {folder}. {why}"
        fix = f"Run `hf-fsdp merge {folder} OUT`, with OUT on another disk, and pass OUT to from_pretrained."
        refuse("FSDP-E437", copy, message, fix)


def without_launcher() -> dict[str, str]:
    """Return the environment of a process that is no rank."""
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
