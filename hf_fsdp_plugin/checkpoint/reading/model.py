"""Loads a checkpoint of any format into a live model. Each rank reads only its own shards."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_fsdp_plugin.backends.ranks.agreement import broadcast_object
from hf_fsdp_plugin.backends.sharding.forward_hooks import persistent_buffers
from hf_fsdp_plugin.checkpoint.errors import raise_if_any
from hf_fsdp_plugin.checkpoint.formats.boxes import slices, whole
from hf_fsdp_plugin.checkpoint.formats.safetensors import read_safetensors_model
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel, StoredTensor
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model
from hf_fsdp_plugin.checkpoint.io import InputFiles
from hf_fsdp_plugin.checkpoint.names import index_file, safetensors_file
from hf_fsdp_plugin.checkpoint.reading.loading import fill, load_stored, mismatch, transfers
from hf_fsdp_plugin.checkpoint.shards import LocalShard, ModelShards, model_shards
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.text import format_names, plural


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
    missing: list[str] = []

    def match(stored: StoredModel) -> Callable[[InputFiles], None]:
        shards = model_shards(model)
        names = _stored_names(model, shards, adapter_only)
        pairs, absent = _pairs(shards, names, stored)
        missing.extend(absent)
        optional: set[str] = set()
        if adapter_only:
            optional = {shard.name for shard in shards.tensors if shard.frozen}
            optional |= {name for name, _ in persistent_buffers(model)}
        required = [name for name in absent if name not in optional]
        _raise_differences(checkpoint, required, _unexpected(model, stored, names), pairs)
        return partial(_fill_pairs, pairs)

    load_stored(checkpoint, "model", lambda: read_stored_model(checkpoint, number, partial=True), match, verify=verify)
    return IncompatibleKeys(missing, [])


def load_tensors(shards: ModelShards, checkpoint: Path, stem: str, *, verify: bool = True) -> bool:
    """Fill ``shards`` from ``STEM.safetensors``, or from the files that its index lists. Collective.

    Returns:
        Whether the checkpoint has these files. If not, nothing was loaded.

    Raises:
        CheckpointError: the tensors are not those of the shards, and nothing was loaded; or bytes are damaged.
    """
    name = safetensors_file(stem)
    if not broadcast_object((checkpoint / name).exists() or (checkpoint / index_file(name)).exists()):
        return False

    def read() -> StoredModel:
        stored = read_safetensors_model(checkpoint, name)
        assert stored is not None, "rank 0 has found the file, and all ranks see the same folder"
        return stored

    def match(stored: StoredModel) -> Callable[[InputFiles], None]:
        names = shards.names()
        pairs, absent = _pairs(shards, names, stored)
        known = {other for each in names.values() for other in each}
        _raise_differences(checkpoint / name, absent, [other for other in stored.tensors if other not in known], pairs)
        return partial(_fill_pairs, pairs)

    load_stored(checkpoint, "model", read, match, verify=verify)
    return True


@torch.no_grad()
def copy_whole_tensors(state: Mapping[str, Any], shards: ModelShards) -> None:
    """Copy this rank's parts of whole tensors to its shards. No communication.

    Raises:
        ValueError: a tensor is missing or has another shape. Nothing was copied.
    """
    found: dict[str, Any] = {
        own: next((state[name] for name in known if name in state), None) for own, known in shards.names().items()
    }
    shapes = {own: getattr(tensor, "shape", None) for own, tensor in found.items()}
    wrong = [shard.name for shard in shards.tensors if shapes[shard.name] != shard.shape]
    if wrong:
        raise ValueError(f"the state_dict has no tensors with the names and shapes of {format_names(wrong, 3)}.")
    for shard in shards.tensors:
        for piece in shard.pieces:
            piece.tensor.copy_(found[shard.name][slices(piece.box, whole(shard.shape))])


_Pair = tuple[LocalShard, StoredTensor]


def _pairs(
    shards: ModelShards, names: Mapping[str, Iterable[str]], stored: StoredModel
) -> tuple[list[_Pair], list[str]]:
    """Return each shard with the stored tensor that has one of its names, and the names of the others."""
    found = {own: next((name for name in known if name in stored.tensors), None) for own, known in names.items()}
    pairs = [(shard, stored.tensors[name]) for shard in shards.tensors if (name := found[shard.name]) is not None]
    return pairs, [own for own, name in found.items() if name is None]


def _fill_pairs(pairs: Iterable[_Pair], files: InputFiles) -> None:
    fill(files, (item for shard, tensor in pairs for item in transfers(tensor, shard.pieces)))


def _raise_differences(
    place: Path, missing: Collection[str], unexpected: Collection[str], pairs: Iterable[_Pair]
) -> None:
    """Raise one problem for each kind of difference between a checkpoint and a model, with a few examples."""
    shapes = [
        f"{shard.name} {list(tensor.shape)}, in the model {list(shard.shape)}"
        for shard, tensor in pairs
        if shard.shape != tensor.shape
    ]
    found = {
        "FSDP-E421": (missing, f"has no values for {plural(len(missing), 'tensor')} of the model"),
        "FSDP-E422": (unexpected, f"has {plural(len(unexpected), 'tensor')} that the model does not have"),
        "FSDP-E423": (shapes, f"has {plural(len(shapes), 'tensor')} with another shape than in the model"),
    }
    raise_if_any(
        [mismatch(code, place, f"{text}: {format_names(names)}.") for code, (names, text) in found.items() if names]
    )


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
