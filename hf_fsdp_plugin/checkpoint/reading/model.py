"""Loads a checkpoint of any format into a live model. Each rank reads only its own shards.

The stored tensors (:mod:`hf_fsdp_plugin.checkpoint.formats.table`) and the rank's shards
(:mod:`hf_fsdp_plugin.checkpoint.shards`) are both described by boxes of whole tensors. So a checkpoint can be loaded
with another world size, mesh or FSDP version. The ranks communicate only to check that no rank failed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.agreement import broadcast_object, on_all_ranks
from hf_fsdp_plugin.backends.buffers import persistent_buffers
from hf_fsdp_plugin.checkpoint.checking.verified_files import check_headers, files_of_checkpoint
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model
from hf_fsdp_plugin.checkpoint.reading import mismatch
from hf_fsdp_plugin.checkpoint.reading.fill import fill, transfers
from hf_fsdp_plugin.checkpoint.shards import ModelShards, model_shards
from hf_fsdp_plugin.checkpoint.visibility import check_visible
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import CheckpointError


class IncompatibleKeys(NamedTuple):
    """The result of ``load_state_dict``, as torch names it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_model(
    model: nn.Module, checkpoint: Path, number: int = 0, *, adapter_only: bool = False, verify: bool = True
) -> IncompatibleKeys:
    """Load the parameters and persistent buffers of a sharded model in place. Collective.

    Args:
        checkpoint: a checkpoint's folder in any format, or the folder of its model.
        number: index of the model in the checkpoint.
        adapter_only: frozen weights may be missing, and keep their values.
        verify: compare the bytes that are read with the hashes of the manifest.

    Returns:
        The names that are missing in the checkpoint (none unless ``adapter_only``), and an empty list of unexpected
        names.

    Raises:
        CheckpointError: files are missing or truncated, elements or tensors are missing, or tensors are unexpected or
            have a different shape. The error contains all problems, and no weight has been changed. Or bytes differ
            from those that were saved; then weights may have been changed.
        SpecError: only some ranks have problems. The message names these ranks.
    """
    on_rank_0 = broadcast_object(checkpoint.exists())
    with on_all_ranks(f"reading {checkpoint}"):
        if on_rank_0:
            check_visible(checkpoint, "reads")
        stored = read_stored_model(checkpoint, number, partial=True)
        files = files_of_checkpoint(checkpoint, stored, verify=verify)
        with files:
            check_headers(files, stored, dist.get_rank(), dist.get_world_size())
    with on_all_ranks(f"comparing {checkpoint} with the model"):
        shards = model_shards(model)
        names = _stored_names(model, shards, adapter_only)
        found = {name: [known for known in names[name] if known in stored.tensors] for name in names}
        missing = [name for name, known in found.items() if not known]
        pairs = [(shard, stored.tensors[found[shard.name][0]]) for shard in shards.tensors if found[shard.name]]
        optional: set[str] = set()
        if adapter_only:
            optional = {shard.name for shard in shards.tensors if shard.frozen}
            optional |= {name for name, _ in persistent_buffers(model)}
        problems = [
            *mismatch.missing_tensors(checkpoint, [name for name in missing if name not in optional]),
            *mismatch.unexpected_tensors(checkpoint, _unexpected(model, stored, names)),
            *mismatch.different_shapes(
                checkpoint,
                {shard.name: (shard.shape, tensor.shape) for shard, tensor in pairs if shard.shape != tensor.shape},
            ),
        ]
        if problems:
            raise CheckpointError(problems)
    with on_all_ranks(f"reading {checkpoint}"), files:
        fill(files, (item for shard, tensor in pairs for item in transfers(tensor, shard.pieces)))
    return IncompatibleKeys(missing, [])


def _stored_names(model: nn.Module, shards: ModelShards, adapter_only: bool) -> dict[str, list[str]]:
    """Return tensor -> its possible names in a checkpoint: its name, tied names, and the names in PEFT's files."""
    names = shards.names()
    if adapter_only:
        for adapter in getattr(unwrapped(model), "peft_config", {}):
            for known in names.values():
                known += [short for name in known if (short := _without_adapter(name, adapter)) != name]
    return names


def _without_adapter(name: str, adapter: str) -> str:
    """Return the name in PEFT's files: ``…q_proj.lora_A.default.weight`` -> ``…q_proj.lora_A.weight``."""
    return re.sub(rf"(\.modules_to_save)?\.{re.escape(adapter)}(?=\.|$)", "", name)


def _unexpected(model: nn.Module, stored: StoredModel, names: dict[str, list[str]]) -> list[str]:
    """Return the stored names that are not in the model, except those that its class ignores (mostly old buffers)."""
    expected = {name for known in names.values() for name in known}
    ignored = getattr(unwrapped(model), "_keys_to_ignore_on_load_unexpected", None) or ()
    return [
        name
        for name in (*stored.tensors, *stored.objects)
        if name not in expected and not any(re.search(pattern, name) for pattern in ignored)
    ]
