"""Checkpoints: written completely or not at all, read in any world, verified byte by byte, merged.

Other packages import from here alone, and file names from :mod:`hf_fsdp_plugin.checkpoint.names`. The names are loaded
on first use: importing the package does not import torch, which ``hf-fsdp inspect``, ``verify`` and ``merge`` start
without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "checking.completeness": ("newest_complete", "numbered_checkpoints", "why_incomplete"),
    "checking.inspection": ("Summary", "checkpoints_of_run", "summarize"),
    "checking.verify": ("Verdict", "verify"),
    "formats.manifest": ("Manifest",),
    "formats.manifest_reader": ("read_manifest",),
    "formats.table": ("read_stored_model", "stored_state_dict_type"),
    "merging.merge": ("MergeOptions", "Merged", "merge"),
    "reading.model": ("load_model",),
    "reading.optimizer": ("load_optimizer",),
    "shards": ("model_shards",),
    "writing.gather": ("full_model_state", "trainable_state"),
    "writing.manager": ("CheckpointManager",),
    "writing.staging": ("recover_interrupted_commit", "recover_run", "remove_checkpoint"),
}
"""Module below this package -> the names that it provides."""

if TYPE_CHECKING:
    from hf_fsdp_plugin.checkpoint.checking.completeness import newest_complete as newest_complete
    from hf_fsdp_plugin.checkpoint.checking.completeness import numbered_checkpoints as numbered_checkpoints
    from hf_fsdp_plugin.checkpoint.checking.completeness import why_incomplete as why_incomplete
    from hf_fsdp_plugin.checkpoint.checking.inspection import Summary as Summary
    from hf_fsdp_plugin.checkpoint.checking.inspection import checkpoints_of_run as checkpoints_of_run
    from hf_fsdp_plugin.checkpoint.checking.inspection import summarize as summarize
    from hf_fsdp_plugin.checkpoint.checking.verify import Verdict as Verdict
    from hf_fsdp_plugin.checkpoint.checking.verify import verify as verify
    from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest as Manifest
    from hf_fsdp_plugin.checkpoint.formats.manifest_reader import read_manifest as read_manifest
    from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model as read_stored_model
    from hf_fsdp_plugin.checkpoint.formats.table import stored_state_dict_type as stored_state_dict_type
    from hf_fsdp_plugin.checkpoint.merging.merge import Merged as Merged
    from hf_fsdp_plugin.checkpoint.merging.merge import MergeOptions as MergeOptions
    from hf_fsdp_plugin.checkpoint.merging.merge import merge as merge
    from hf_fsdp_plugin.checkpoint.reading.model import load_model as load_model
    from hf_fsdp_plugin.checkpoint.reading.optimizer import load_optimizer as load_optimizer
    from hf_fsdp_plugin.checkpoint.shards import model_shards as model_shards
    from hf_fsdp_plugin.checkpoint.writing.gather import full_model_state as full_model_state
    from hf_fsdp_plugin.checkpoint.writing.gather import trainable_state as trainable_state
    from hf_fsdp_plugin.checkpoint.writing.manager import CheckpointManager as CheckpointManager
    from hf_fsdp_plugin.checkpoint.writing.staging import recover_interrupted_commit as recover_interrupted_commit
    from hf_fsdp_plugin.checkpoint.writing.staging import recover_run as recover_run
    from hf_fsdp_plugin.checkpoint.writing.staging import remove_checkpoint as remove_checkpoint


def __getattr__(name: str) -> Any:
    for module, names in _EXPORTS.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(name for names in _EXPORTS.values() for name in names)
