"""Loads a checkpoint of any format into a live model: each rank reads its own shards, and nothing else.

The stored tensors (:mod:`hf_fsdp_plugin.checkpoint.formats.table`) and the rank's shards
(:mod:`hf_fsdp_plugin.checkpoint.shards`) are both described by boxes of whole tensors. So a checkpoint of any world,
mesh and FSDP version can be loaded into any other. The ranks communicate only to agree that no rank failed.
"""

from __future__ import annotations

import re
from pathlib import Path

from torch import nn

from hf_fsdp_plugin.backends.agreement import on_all_ranks
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model
from hf_fsdp_plugin.checkpoint.reading import mismatch
from hf_fsdp_plugin.checkpoint.reading.fill import fill, transfers
from hf_fsdp_plugin.checkpoint.shards import ModelShards, model_shards, persistent_buffers
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.torch_private.functions import IncompatibleKeys


def load_model(model: nn.Module, checkpoint: Path, number: int = 0, *, adapter_only: bool = False) -> IncompatibleKeys:
    """Load the parameters and persistent buffers of a sharded model in place. Collective.

    Args:
        checkpoint: a checkpoint's folder in any format, or the folder of its model.
        number: which of the models in the checkpoint.
        adapter_only: frozen weights may be missing, and keep their values.

    Returns:
        The names that are missing in the checkpoint (none, unless ``adapter_only``), and no unexpected names.

    Raises:
        CheckpointError: with all problems, before any weight is changed: files are missing or cut short, elements or
            tensors are missing, tensors are unexpected or have another shape. Problems of some ranks only are a
            ``SpecError`` that names the ranks.
    """
    with on_all_ranks(f"comparing {checkpoint} with the model"):
        stored = read_stored_model(checkpoint, number)
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
    with on_all_ranks(f"reading {checkpoint}"):
        fill(stored.root, (item for shard, tensor in pairs for item in transfers(tensor, shard.pieces)))
    return IncompatibleKeys(missing, [])


def _stored_names(model: nn.Module, shards: ModelShards, adapter_only: bool) -> dict[str, list[str]]:
    """Tensor -> its possible names in a checkpoint: its own, its ties, and the names in PEFT's files."""
    names: dict[str, list[str]] = {shard.name: [shard.name] for shard in shards.tensors}
    for alias, name in shards.aliases.items():
        names[name].append(alias)
    if adapter_only:
        for adapter in getattr(unwrapped(model), "peft_config", {}):
            for known in names.values():
                known += [short for name in known if (short := _without_adapter(name, adapter)) != name]
    return names


def _without_adapter(name: str, adapter: str) -> str:
    """``…q_proj.lora_A.default.weight`` -> ``…q_proj.lora_A.weight``, the name in PEFT's own files."""
    return re.sub(rf"(\.modules_to_save)?\.{re.escape(adapter)}(?=\.|$)", "", name)


def _unexpected(model: nn.Module, stored: StoredModel, names: dict[str, list[str]]) -> list[str]:
    """The stored names that no tensor of the model has, and that its class does not ignore (mostly old buffers)."""
    expected = {name for known in names.values() for name in known}
    ignored = getattr(unwrapped(model), "_keys_to_ignore_on_load_unexpected", None) or ()
    return [
        name
        for name in (*stored.tensors, *stored.objects)
        if name not in expected and not any(re.search(pattern, name) for pattern in ignored)
    ]
