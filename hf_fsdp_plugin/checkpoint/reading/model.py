"""A checkpoint of any format back into a live model: every rank reads what it holds, and nothing else.

Where tensors lie is told by an index (:mod:`hf_fsdp_plugin.checkpoint.formats.table`), what a rank holds by its shards
(:mod:`hf_fsdp_plugin.checkpoint.shards`). Both are boxes of whole tensors, so that any world, mesh and version of FSDP
reads what any other wrote. The ranks speak to each other only to agree that all went well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import nn

from hf_fsdp_plugin.backends.agreement import on_all_ranks
from hf_fsdp_plugin.checkpoint.formats.stored import StoredModel, StoredTensor
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model
from hf_fsdp_plugin.checkpoint.reading import mismatch
from hf_fsdp_plugin.checkpoint.reading.fill import fill, transfers
from hf_fsdp_plugin.checkpoint.shards import Held, ModelShards, model_shards, persistent_buffers
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.torch_private.functions import IncompatibleKeys


def load_model(model: nn.Module, checkpoint: Path, number: int = 0, *, adapter_only: bool = False) -> IncompatibleKeys:
    """Fill the parameters and persistent buffers of a sharded model, in place. Collective.

    Args:
        checkpoint: a checkpoint's folder in any format, or the folder of its model.
        number: which of several models in one checkpoint.
        adapter_only: frozen weights may be missing, and keep their values.

    Returns:
        The names that the checkpoint lacks, which is possible with ``adapter_only`` alone; none is unexpected.

    Raises:
        CheckpointError: with all that is wrong, and before any weight is touched: files that are not there or cut
            short, holes, missing and unexpected tensors, other shapes. What is wrong on some ranks only is a
            ``SpecError`` that names them.
    """
    with on_all_ranks(f"comparing {checkpoint} with the model"):
        index = read_stored_model(checkpoint, number)
        shards = model_shards(model)
        pairs, missing = _pair(model, shards, index, adapter_only)
        problems = list(_problems(model, shards, index, pairs, missing, checkpoint, adapter_only))
        if problems:
            raise CheckpointError(problems)
    with on_all_ranks(f"reading {checkpoint}"):
        fill(index.root, (item for held, stored in pairs for item in transfers(stored, held.pieces)))
    return IncompatibleKeys(missing, [])


def _pair(
    model: nn.Module, shards: ModelShards, index: StoredModel, adapter_only: bool
) -> tuple[list[tuple[Held, StoredTensor]], list[str]]:
    """Each tensor with what is stored of it; and the names of those that nothing is stored of."""
    names = _names(model, shards, adapter_only)
    pairs, missing = [], []
    for held in shards.tensors:
        stored = next((index.tensors[name] for name in names[held.name] if name in index.tensors), None)
        if stored is None:
            missing.append(held.name)
        else:
            pairs.append((held, stored))
    return pairs, missing


def _names(model: nn.Module, shards: ModelShards, adapter_only: bool) -> dict[str, list[str]]:
    """Tensor -> all names under which it may be stored: its own, those tied to it, and PEFT's without the adapter's."""
    names: dict[str, list[str]] = {held.name: [held.name] for held in shards.tensors}
    for alias, name in shards.aliases.items():
        names[name].append(alias)
    if adapter_only:
        for adapter in getattr(unwrapped(model), "peft_config", {}):
            for known in names.values():
                known += [short for name in known if (short := _without_adapter(name, adapter)) != name]
    return names


def _without_adapter(name: str, adapter: str) -> str:
    """``…q_proj.lora_A.default.weight`` -> ``…q_proj.lora_A.weight``, as PEFT's own files have it."""
    return re.sub(rf"(\.modules_to_save)?\.{re.escape(adapter)}(?=\.|$)", "", name)


def _problems(
    model: nn.Module,
    shards: ModelShards,
    index: StoredModel,
    pairs: list[tuple[Held, StoredTensor]],
    missing: list[str],
    checkpoint: Path,
    adapter_only: bool,
) -> Iterator[Problem]:
    if adapter_only:
        untrained = {held.name for held in shards.tensors if held.frozen} | {
            name for name, _ in persistent_buffers(model)
        }
        missing = [name for name in missing if name not in untrained]
    yield from mismatch.missing(checkpoint, missing)
    expected = {name for names in _names(model, shards, adapter_only).values() for name in names}
    ignored = getattr(unwrapped(model), "_keys_to_ignore_on_load_unexpected", None) or ()
    stored_names = [*index.tensors, *index.objects]
    yield from mismatch.unexpected(checkpoint, list(_unexpected(stored_names, expected, ignored)))
    shapes = {held.name: (held.shape, stored.shape) for held, stored in pairs if held.shape != stored.shape}
    yield from mismatch.other_shapes(checkpoint, shapes)


def _unexpected(stored: Iterable[str], expected: set[str], ignored: Iterable[str]) -> Iterator[str]:
    """Less those that the model's class declares it does not mind, old buffers mostly."""
    patterns = [re.compile(pattern) for pattern in ignored]
    for name in stored:
        if name not in expected and not any(pattern.search(name) for pattern in patterns):
            yield name
