"""Loads a checkpoint of any format into a live model: each rank reads its own shards, and nothing else.

The stored tensors (:mod:`hf_fsdp_plugin.checkpoint.formats.table`) and the rank's shards
(:mod:`hf_fsdp_plugin.checkpoint.shards`) are both described by boxes of whole tensors. So every world, mesh and version
of FSDP reads what any other has written. The ranks communicate only to agree that no rank failed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import nn

from hf_fsdp_plugin.backends.agreement import on_all_ranks
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel, StoredTensor
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model
from hf_fsdp_plugin.checkpoint.layouts import LocalShard
from hf_fsdp_plugin.checkpoint.reading import mismatch
from hf_fsdp_plugin.checkpoint.reading.fill import fill, transfers
from hf_fsdp_plugin.checkpoint.shards import ModelShards, model_shards, persistent_buffers
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.torch_private.functions import IncompatibleKeys


def load_model(model: nn.Module, checkpoint: Path, number: int = 0, *, adapter_only: bool = False) -> IncompatibleKeys:
    """Load the parameters and persistent buffers of a sharded model in place. Collective.

    Args:
        checkpoint: a checkpoint's folder in any format, or the folder of its model.
        number: which of the models in the checkpoint.
        adapter_only: frozen weights may be missing, and keep their values.

    Returns:
        The names that the checkpoint does not have (none, unless ``adapter_only``), and no unexpected names.

    Raises:
        CheckpointError: with all problems, before any weight is changed: files are missing or cut short, elements or
            tensors are missing, tensors are unexpected or have another shape. Problems of some ranks only are a
            ``SpecError`` that names the ranks.
    """
    with on_all_ranks(f"comparing {checkpoint} with the model"):
        stored = read_stored_model(checkpoint, number)
        shards = model_shards(model)
        pairs, missing = _pair(model, shards, stored, adapter_only)
        problems = list(_problems(model, shards, stored, pairs, missing, checkpoint, adapter_only))
        if problems:
            raise CheckpointError(problems)
    with on_all_ranks(f"reading {checkpoint}"):
        fill(stored.root, (item for shard, tensor in pairs for item in transfers(tensor, shard.pieces)))
    return IncompatibleKeys(missing, [])


def _pair(
    model: nn.Module, shards: ModelShards, stored: StoredModel, adapter_only: bool
) -> tuple[list[tuple[LocalShard, StoredTensor]], list[str]]:
    """Each shard with its stored tensor, and the names of the shards without one."""
    names = _stored_names(model, shards, adapter_only)
    pairs, missing = [], []
    for shard in shards.tensors:
        tensor = next((stored.tensors[name] for name in names[shard.name] if name in stored.tensors), None)
        if tensor is None:
            missing.append(shard.name)
        else:
            pairs.append((shard, tensor))
    return pairs, missing


def _stored_names(model: nn.Module, shards: ModelShards, adapter_only: bool) -> dict[str, list[str]]:
    """Tensor -> all names that it may have in a checkpoint: its own, tied ones, and PEFT's without the adapter's."""
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


def _problems(
    model: nn.Module,
    shards: ModelShards,
    stored: StoredModel,
    pairs: list[tuple[LocalShard, StoredTensor]],
    missing: list[str],
    checkpoint: Path,
    adapter_only: bool,
) -> Iterator[Problem]:
    if adapter_only:
        untrained = {shard.name for shard in shards.tensors if shard.frozen}
        untrained |= {name for name, _ in persistent_buffers(model)}
        missing = [name for name in missing if name not in untrained]
    yield from mismatch.missing_tensors(checkpoint, missing)
    expected = {name for names in _stored_names(model, shards, adapter_only).values() for name in names}
    ignored = getattr(unwrapped(model), "_keys_to_ignore_on_load_unexpected", None) or ()
    names = [*stored.tensors, *stored.objects]
    yield from mismatch.unexpected_tensors(checkpoint, list(_unexpected(names, expected, ignored)))
    shapes = {shard.name: (shard.shape, tensor.shape) for shard, tensor in pairs if shard.shape != tensor.shape}
    yield from mismatch.different_shapes(checkpoint, shapes)


def _unexpected(stored: Iterable[str], expected: set[str], ignored: Iterable[str]) -> Iterator[str]:
    """``stored`` without expected names, and without those that the model's class ignores (mostly old buffers)."""
    patterns = [re.compile(pattern) for pattern in ignored]
    for name in stored:
        if name not in expected and not any(pattern.search(name) for pattern in patterns):
            yield name
