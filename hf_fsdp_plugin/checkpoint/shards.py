"""Returns this rank's shards of a model and an optimizer, and selects the shards that it writes. No communication."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.checkpoint.formats.boxes import whole
from hf_fsdp_plugin.checkpoint.optimizer_state import state_layout
from hf_fsdp_plugin.checkpoint.shard_layout import (
    LocalShard,
    ParameterLayout,
    Piece,
    local_tensor,
    model_layout,
    replicated_layout,
)
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.torch_private.modules import buffers, non_persistent_buffers


@dataclass(frozen=True, slots=True)
class ModelShards:
    """This rank's shards of parameters and persistent buffers, by canonical name.

    Attributes:
        aliases: other names of tied parameters -> the name in ``tensors``.
    """

    tensors: tuple[LocalShard, ...]
    aliases: Mapping[str, str]

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        groups: dict[str, list[str]] = {}
        for alias, name in self.aliases.items():
            groups.setdefault(name, [name]).append(alias)
        return tuple(tuple(group) for group in groups.values())


@dataclass(frozen=True, slots=True)
class OptimizerShards:
    """An optimizer's state, keyed by the canonical names of the parameters.

    Attributes:
        state: parameter -> key -> this rank's part of a tensor, or a plain value.
        groups: the optimizer's parameter groups, with names instead of parameters.
    """

    state: Mapping[str, Mapping[str, LocalShard | Any]]
    groups: tuple[Mapping[str, Any], ...]


def model_shards(model: nn.Module) -> ModelShards:
    """Return the shards of parameters and persistent buffers. Gathered parameters are resharded first."""
    layout = model_layout(model)
    tensors = [own.local_shard(name, local) for name, (own, local) in layout.local.items()]
    for name, buffer in persistent_buffers(model):
        tensors.append(replicated_layout(name, buffer).local_shard(name, local_tensor(buffer)))
    return ModelShards(tuple(tensors), layout.aliases)


def optimizer_shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerShards:
    """Return the state and the groups of an optimizer with parameters of ``model``.

    Raises:
        CheckpointError: a state tensor is neither laid out like its parameter nor a single number.
    """
    layout = model_layout(model)
    state: dict[str, dict[str, Any]] = {}
    unsupported: list[str] = []
    groups = []
    for group in optimizer.param_groups:
        names: list[str] = []
        for parameter in group["params"]:
            for own in layout.by_id.get(id(parameter), ()):
                names.append(own.name)
                entries = optimizer.state.get(parameter, {})
                found = {key: _state_entry(own, key, value, parameter, unsupported) for key, value in entries.items()}
                if found:
                    state[own.name] = found
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": names})
    if unsupported:
        raise CheckpointError([_unsupported_state(unsupported)])
    return OptimizerShards(state, tuple(groups))


def _state_entry(own: ParameterLayout, key: str, value: Any, parameter: torch.Tensor, unsupported: list[str]) -> Any:
    """Return a state value as a shard, a scalar that is equal on all ranks, or a plain value."""
    if not isinstance(value, torch.Tensor):
        return value
    name = f"state.{own.name}.{key}"
    local, shard = local_tensor(value), local_tensor(parameter)
    shapes = tuple(local.shape), tuple(shard.shape)
    if own.start is not None and local.numel() > 1:  # a whole FSDP1 unit, which is flat
        shapes = (local.numel(),), (shard.numel(),)
    layout = state_layout(key, *shapes)
    if layout == "like_parameter":
        return own.local_shard(name, local)
    if layout == "scalar":
        return LocalShard(name, local.dtype, tuple(local.shape), (Piece(whole(local.shape), local.detach()),))
    mismatch = f"has shape {list(local.shape)}, but the parameter's shard has shape {list(shard.shape)}"
    unsupported.append(f"'{key}' of {own.name} {mismatch}")
    return None


def _unsupported_state(entries: list[str]) -> Problem:
    return Problem(
        code="FSDP-E411",
        message=f"the optimizer keeps state that is not laid out like its parameters: {format_names(entries)}.",
        fix="Use an optimizer whose state tensors have the parameter's shape or one element (AdamW, SGD), or save the "
        "model alone (save_only_model: true).",
    )


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the canonical names and the buffers of the state dict."""
    for name, module in model.named_modules():
        for attribute, buffer in buffers(module).items():
            if buffer is not None and attribute not in non_persistent_buffers(module):
                yield canonical_name(f"{name}.{attribute}".lstrip(".")), buffer


def shards_to_write(shards: Iterable[LocalShard]) -> list[LocalShard]:
    """Return the shards that this rank writes. Replicas divide them by size, with the same result on every rank."""
    loads: dict[int, list[int]] = {}
    mine = []
    for shard in shards:
        load = loads.setdefault(shard.replicas, [0] * shard.replicas)
        writer = load.index(min(load))
        load[writer] += shard.num_bytes
        if writer == shard.replica and shard.pieces:
            mine.append(shard)
    return mine
