"""Checkpoints: atomic writing, loading with any world size, verification of every byte, and merging.

Other packages import only from this module, and file names from :mod:`hf_fsdp_plugin.checkpoint.names`. Exports are
loaded on first use, so that ``hf-fsdp inspect``, ``verify`` and ``merge`` start without importing torch.
"""

# ruff: noqa: F401

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "checking.against_model": (
        "ModelTensor",
        "ShapeMismatch",
        "check_model_index",
        "raise_absent_tensors",
        "raise_shape_mismatches",
        "read_model_headers",
        "required_names",
    ),
    "checking.completeness": ("newest_complete", "numbered_checkpoints", "why_incomplete"),
    "checking.inspection": ("Summary", "checkpoints_of_run", "summarize"),
    "checking.verify": ("Verdict", "verify"),
    "errors": ("refuse",),
    "folders": ("check_visible", "recover_interrupted_commit", "recover_run", "remove_checkpoint"),
    "formats.manifest": ("Manifest", "read_manifest", "record_file", "write_manifest"),
    "formats.known_formats": ("read_stored_model", "stored_state_dict_type"),
    "io": ("InputFiles", "object_in"),
    "merging.copying": ("same_elements",),
    "merging.merge": ("MergeOptions", "Merged", "merge", "with_whole_weights"),
    "reading.loading": ("copy_whole_tensors", "load_model", "load_tensors"),
    "reading.optimizer": ("load_optimizer",),
    "reading.states": ("check_states", "load_state"),
    "shards": ("ModelShards", "model_shards", "parameter_shards", "shards_below"),
    "writing.manager": ("CheckpointManager",),
    "writing.save": ("StagingFolder",),
    "writing.state_files": ("gathered_state", "manifest_of"),
}
"""Module below this package -> the names that it provides."""

if TYPE_CHECKING:
    from hf_fsdp_plugin.checkpoint.checking.against_model import (
        ModelTensor,
        ShapeMismatch,
        check_model_index,
        raise_absent_tensors,
        raise_shape_mismatches,
        read_model_headers,
        required_names,
    )
    from hf_fsdp_plugin.checkpoint.checking.completeness import newest_complete, numbered_checkpoints, why_incomplete
    from hf_fsdp_plugin.checkpoint.checking.inspection import Summary, checkpoints_of_run, summarize
    from hf_fsdp_plugin.checkpoint.checking.verify import Verdict, verify
    from hf_fsdp_plugin.checkpoint.errors import refuse
    from hf_fsdp_plugin.checkpoint.folders import (
        check_visible,
        recover_interrupted_commit,
        recover_run,
        remove_checkpoint,
    )
    from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, stored_state_dict_type
    from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest, read_manifest, record_file, write_manifest
    from hf_fsdp_plugin.checkpoint.io import InputFiles, object_in
    from hf_fsdp_plugin.checkpoint.merging.copying import same_elements
    from hf_fsdp_plugin.checkpoint.merging.merge import Merged, MergeOptions, merge, with_whole_weights
    from hf_fsdp_plugin.checkpoint.reading.loading import copy_whole_tensors, load_model, load_tensors
    from hf_fsdp_plugin.checkpoint.reading.optimizer import load_optimizer
    from hf_fsdp_plugin.checkpoint.reading.states import check_states, load_state
    from hf_fsdp_plugin.checkpoint.shards import ModelShards, model_shards, parameter_shards, shards_below
    from hf_fsdp_plugin.checkpoint.writing.manager import CheckpointManager
    from hf_fsdp_plugin.checkpoint.writing.save import StagingFolder
    from hf_fsdp_plugin.checkpoint.writing.state_files import gathered_state, manifest_of


def __getattr__(name: str) -> Any:
    for module, names in _EXPORTS.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(name for names in _EXPORTS.values() for name in names)
