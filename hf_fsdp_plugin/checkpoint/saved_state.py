"""What is saved of a model and an optimizer: this rank's shards, and which of them it writes. No communication.

torch's ``get_model_state_dict`` gathers every FSDP1 parameter and shards it again along dim 0. This module needs no
gather: an FSDP1 shard is a contiguous range of each flattened parameter, and such a range consists of a few boxes of
the whole tensor. Shards of both FSDP versions are described by such boxes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, Replicate

from hf_fsdp_plugin.backends.optimizers.known_optimizers import has_per_shard_state
from hf_fsdp_plugin.backends.optimizers.offloaded_steps import wait_for_state
from hf_fsdp_plugin.backends.optimizers.parameters import JointModels, step_mode
from hf_fsdp_plugin.backends.sharding.buffers import persistent_buffers
from hf_fsdp_plugin.backends.sharding.script_access import check_not_whole, free_gathered
from hf_fsdp_plugin.checkpoint.formats import optimizer_state
from hf_fsdp_plugin.checkpoint.formats.boxes import Box, flat_range, whole_box
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.text import format_dtype, format_names
from hf_fsdp_plugin.torch_private import fsdp1
from hf_fsdp_plugin.torch_private.functions import can_create_state, compute_local_shape_and_global_offset
from hf_fsdp_plugin.torch_private.modules import buffers, local_tensor, non_persistent_buffers


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a whole tensor, and the memory in which this rank holds it. The memory has the shape of the box."""

    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class LocalShard:
    """This rank's part of one tensor.

    Attributes:
        shape: shape of the whole tensor.
        replica: index of this rank among the ``replicas`` ranks that hold the same part. One of them writes it.
        frozen: whether the tensor is a parameter that needs no gradient.
        start: index of the first element in the flat memory of an FSDP1 unit; ``None`` if the rank's memory of the
            tensor contains nothing else.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    replica: int = 0
    replicas: int = 1
    frozen: bool = False
    start: int | None = None

    @property
    def boxes(self) -> list[Box]:
        return [piece.box for piece in self.pieces]

    @property
    def num_bytes(self) -> int:
        return sum(piece.box.numel for piece in self.pieces) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """``float32``, ``bfloat16``, …"""
        return format_dtype(self.dtype)

    def like(self, name: str, local: torch.Tensor) -> LocalShard:
        """Return ``local``, which is laid out like this rank's memory of the tensor, as a shard."""
        return replace(self, name=name, dtype=local.dtype, pieces=pieces_in(local, self.boxes, self.start))


def pieces_in(local: torch.Tensor, boxes: Iterable[Box], start: int | None = None) -> tuple[Piece, ...]:
    """Return the boxes with their memory, which is one after the other in ``local``, from the element ``start`` on."""
    if not local.is_contiguous():  # one box of a DTensor with a different memory format
        assert start is None, "FSDP1 shards are contiguous"
        return tuple(Piece(box, local.detach()) for box in boxes)
    flat, done = local.detach().reshape(-1), start or 0
    pieces = []
    for box in boxes:
        pieces.append(Piece(box, flat.narrow(0, done, box.numel).view(box.sizes)))
        done += box.numel
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class ModelShards:
    """This rank's shards of parameters and persistent buffers, by canonical name.

    Attributes:
        aliases: other names of tied parameters -> the name in ``tensors``.
        by_id: ``id`` of an optimizer's parameter object -> the shards in it: several in FSDP1's flat parameters.
    """

    tensors: tuple[LocalShard, ...]
    aliases: Mapping[str, str]
    by_id: Mapping[int, Sequence[LocalShard]] = field(default_factory=dict)

    def names(self) -> dict[str, list[str]]:
        """Return name in ``tensors`` -> all names of the tensor. Another checkpoint may use any of them."""
        names = {shard.name: [shard.name] for shard in self.tensors}
        for alias, name in self.aliases.items():
            names[name].append(alias)
        return names


@torch.no_grad()  # without it, DTensor.to_local is an operation of autograd
def parameter_shards(model: nn.Module) -> ModelShards:
    """Return the shards of the parameters. Gathered parameters are resharded first."""
    for each in model.values() if isinstance(model, JointModels) else (model,):
        check_not_whole(each, "the model was saved, loaded or averaged")
        free_gathered(each)
    module_names = _module_names(model)
    tensors: dict[str, LocalShard] = {}
    aliases: dict[str, str] = {}
    by_id: dict[int, Sequence[LocalShard]] = {}
    in_flat: set[int] = set()

    def full_names(module: nn.Module, attribute: str) -> list[str]:
        """Return the parameter's name for each name of the module. The last one is its name in ``tensors``."""
        return [f"{name}.{attribute}".lstrip(".") for name in module_names[id(module)]]

    for unit in model.modules():
        if not isinstance(unit, FSDP) or (flat := fsdp1.flat_parameter(unit)) is None:
            continue
        local, group = fsdp1.local_shard(flat), fsdp1.replicate_group(unit)
        replica, replicas = (group.rank(), group.size()) if group is not None else (0, 1)
        in_unit = []
        for member in fsdp1.original_parameters(flat):
            *others, name = full_names(member.module, member.attribute)
            aliases.update(dict.fromkeys(others, name))
            shape, frozen, start = tuple(member.shape), not member.requires_grad, member.offset
            pieces = pieces_in(local, flat_range(shape, member.start, member.stop), start)
            shard = LocalShard(name, local.dtype, shape, pieces, replica, replicas, frozen, start)
            in_unit.append(shard)
            tensors[name] = shard
            if member.parameter is not None:
                # The original parameter is a view of its range, and its state has the size of the range.
                by_id[id(member.parameter)] = [replace(shard, start=None)]
        by_id[id(flat)] = in_unit
        for place, primary_place in fsdp1.tied_places(flat):
            aliases.update(dict.fromkeys(full_names(*place), full_names(*primary_place)[-1]))
        in_flat.update(map(id, fsdp1.parameter_objects(flat)))
    for raw_name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in in_flat or isinstance(parameter, FlatParameter):
            continue
        name = canonical_name(raw_name)
        if id(parameter) not in by_id:
            if isinstance(parameter, DTensor):
                tensors[name] = _dtensor_shard(name, parameter)
            else:
                tensors[name] = _replicated_shard(name, parameter)
            by_id[id(parameter)] = [tensors[name]]
        elif by_id[id(parameter)][0].name != name:
            aliases[name] = by_id[id(parameter)][0].name
    return ModelShards(tuple(tensors.values()), aliases, by_id)


def _module_names(model: nn.Module) -> dict[int, list[str]]:
    """Return ``id`` of a module -> all of its canonical names."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(canonical_name(name))
    return names


def _dtensor_shard(name: str, parameter: DTensor) -> LocalShard:
    mesh, placements = parameter.device_mesh, parameter.placements
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    replica, replicas, world_size = 0, 1, dist.get_world_size()
    if mesh.size() < world_size:
        replica, replicas = replica_of_ranks(tuple(sorted(mesh.mesh.flatten().tolist())), world_size)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            replica = replica * mesh.size(axis) + mesh.get_local_rank(axis)
            replicas *= mesh.size(axis)
    box, local = Box(tuple(offsets), tuple(sizes)), local_tensor(parameter)
    pieces = pieces_in(local, [box] if box.numel else [])
    return LocalShard(name, local.dtype, tuple(parameter.shape), pieces, replica, replicas, not parameter.requires_grad)


@functools.cache
def replica_of_ranks(ranks: tuple[int, ...], world_size: int) -> tuple[int, int]:
    """Return which of the groups of ranks with equal tensors this one is, and their number.

    A parameter that no tensor-parallel plan divides is on a mesh without that axis: other ranks have it, too.
    """
    steps, covered, first_ranks = [rank - ranks[0] for rank in ranks], set[int](), []
    for rank in range(world_size):
        if rank not in covered:
            first_ranks.append(rank)
            covered.update(rank + step for step in steps)
    return first_ranks.index(ranks[0]), len(first_ranks)


def _replicated_shard(name: str, tensor: torch.Tensor) -> LocalShard:
    """Return a tensor that is whole on every rank."""
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    whole = replace(whole_shard(name, local_tensor(tensor)), frozen=frozen)
    if not dist.is_initialized():
        return whole
    return replace(whole, replica=dist.get_rank(), replicas=dist.get_world_size())


def model_shards(
    model: nn.Module, parameters: ModelShards | None = None, *, only_trained: bool = False, copy_buffers: bool = False
) -> ModelShards:
    """Return the shards of parameters and persistent buffers. Gathered parameters are resharded first.

    Args:
        parameters: the result of :func:`parameter_shards`, if there is one already.
        only_trained: without frozen parameters and aliases: all that a checkpoint of an adapter contains of the model.
        copy_buffers: with copies of the buffers, which the next forward may change.
    """
    parameters = parameters or parameter_shards(model)
    found = [(name, buffer.clone() if copy_buffers else buffer) for name, buffer in persistent_buffers(model)]
    # The ranks may have different statistics, which must not be mixed: rank 0 is the only replica that writes.
    own_buffers = [replace(_replicated_shard(name, buffer), replicas=1) for name, buffer in found]
    if only_trained:
        return ModelShards(tuple(shard for shard in (*parameters.tensors, *own_buffers) if not shard.frozen), {})
    aliases = {**parameters.aliases, **_buffer_aliases(model)}
    return replace(parameters, tensors=(*parameters.tensors, *own_buffers), aliases=aliases)


def _buffer_aliases(model: nn.Module) -> dict[str, str]:
    """Return other names of persistent buffers -> the first one: those of modules that several modules contain."""
    names, aliases = _module_names(model), dict[str, str]()
    for module in model.modules():
        first, *others = names[id(module)]
        for attribute, buffer in buffers(module).items():
            if buffer is not None and attribute not in non_persistent_buffers(module):
                aliases |= {f"{other}.{attribute}": f"{first}.{attribute}" for other in others}
    return aliases


def shards_below(shards: ModelShards, prefix: str) -> ModelShards:
    """Return the shards whose names begin with ``prefix``, without it: those of a module of the model.

    A weight that is tied to a weight outside of the module is included with its name in the module.
    """
    if not prefix:
        return shards
    tensors = {shard.name: shard for shard in shards.tensors}
    names: dict[str, list[str]] = {}
    for name, held in [*((name, name) for name in tensors), *shards.aliases.items()]:
        if name.startswith(prefix):
            names.setdefault(held, []).append(name.removeprefix(prefix))
    own = tuple(replace(tensors[held], name=first) for held, (first, *_) in names.items())
    return ModelShards(own, {alias: first for first, *others in names.values() for alias in others})


@dataclass(frozen=True, slots=True)
class OptimizerShards:
    """An optimizer's state, keyed by the canonical names of the parameters.

    Attributes:
        state: parameter -> key -> this rank's part of a tensor, or a plain value.
        groups: the optimizer's parameter groups, with names instead of parameters.
    """

    state: Mapping[str, Mapping[str, LocalShard | Any]]
    groups: tuple[Mapping[str, Any], ...]


@torch.no_grad()
def optimizer_shards(
    model: nn.Module, optimizer: torch.optim.Optimizer, parameters: ModelShards | None = None
) -> OptimizerShards:
    """Return the state and the groups of an optimizer with parameters of ``model``.

    Args:
        parameters: the result of :func:`parameter_shards`, if there is one already.

    Raises:
        CheckpointError: the state contains a tensor with an unknown layout, or an object.
    """
    by_id = (parameters or parameter_shards(model)).by_id
    wait_for_state(optimizer)
    per_shard = has_per_shard_state(optimizer)
    state: dict[str, dict[str, Any]] = {}
    groups = []
    unsupported: list[str] = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        for key, value in settings.items():
            for found in optimizer_state.unsupported_values(value):
                # Scalars and dtypes can be stored. One rank would store its part of other tensors only.
                is_setting = found.numel() == 1 if isinstance(found, torch.Tensor) else isinstance(found, torch.dtype)
                if not is_setting:
                    unsupported.append(f"'{key}' of a parameter group contains a {type(found).__name__}")
        names: list[str] = []
        for parameter in group["params"]:
            for own in by_id.get(id(parameter), ()):
                names.append(own.name)
                for key, value in optimizer.state.get(parameter, {}).items():
                    try:
                        entries = _state_entries(optimizer, own, parameter, key, value, per_shard=per_shard)
                        state.setdefault(own.name, {}).update(entries)
                    except _UnsupportedState as error:
                        unsupported.append(str(error))
        groups.append({**settings, "params": names})
    if unsupported:
        message = f"the optimizer keeps state that cannot be stored by parameter: {format_names(unsupported)}."
        fix = (
            "Use an optimizer whose state tensors have the parameter's shape or one element (AdamW, SGD), or save the "
            "model alone (save_only_model: true)."
        )
        raise CheckpointError([Problem(code="FSDP-E411", message=message, fix=fix)])
    return OptimizerShards({name: entries for name, entries in state.items() if entries}, tuple(groups))


class _UnsupportedState(Exception):
    """A value of an optimizer's state cannot be stored. The message names the value."""


def _state_entries(
    optimizer: torch.optim.Optimizer, own: LocalShard, parameter: torch.Tensor, key: str, value: Any, *, per_shard: bool
) -> dict[str, LocalShard | Any]:
    """Return a value of a parameter's state by its keys in a checkpoint: a shard, a scalar of all ranks, or an object.

    A state tensor whose meaning depends on the shard has a key with the elements of the shard.
    """
    if not isinstance(value, torch.Tensor):
        if optimizer_state.unsupported_values(value):
            raise _UnsupportedState(f"'{key}' of {own.name} is a {type(value).__name__} object")
        return {key: value}
    name = f"state.{own.name}.{key}"
    local, shard = local_tensor(value), local_tensor(parameter)
    if not per_shard:
        of_whole = step_mode(optimizer) == "whole" and value.numel() > 1
        if of_whole and isinstance(parameter, DTensor) and not isinstance(value, DTensor):
            return {key: _replicated_shard(name, value)}
        shapes = tuple(local.shape), tuple(shard.shape)
        if own.start is not None and local.numel() > 1:  # a whole FSDP1 unit, which is flat
            shapes = (local.numel(),), (shard.numel(),)
        layout = optimizer_state.state_layout(key, *shapes)
        if layout != "other":
            return {key: own.like(name, local) if layout == "like_parameter" else whole_shard(name, local)}
    is_subclass = type(local) is not torch.Tensor
    is_placed = isinstance(value, DTensor) and value.shape != parameter.shape
    if own.start is not None or is_placed or (is_subclass and not can_create_state(optimizer)):
        kind = f" ({type(local).__name__})" if is_subclass else ""
        shapes_text = f"shape {list(local.shape)}{kind}, and the parameter's shard has shape {list(shard.shape)}"
        raise _UnsupportedState(f"'{key}' of {own.name} has {shapes_text}")
    if not own.pieces:
        return {}
    tensors = {"": local}
    if is_subclass:
        attributes: list[str] = local.__tensor_flatten__()[0]
        tensors = {attribute: getattr(local, attribute) for attribute in attributes}
    elements = optimizer_state.range_of(own.boxes, own.shape)
    stored = {optimizer_state.shard_key(key, attribute, elements): tensor for attribute, tensor in tensors.items()}
    shards = {key: whole_shard(f"state.{own.name}.{key}", tensor) for key, tensor in stored.items()}
    return {key: replace(each, replica=own.replica, replicas=own.replicas) for key, each in shards.items()}


def whole_shard(name: str, tensor: torch.Tensor) -> LocalShard:
    """Return a tensor that this rank stores as a whole."""
    shape = tuple(tensor.shape)
    return LocalShard(name, tensor.dtype, shape, (Piece(whole_box(shape), tensor.detach()),))


def shards_to_write(shards: Iterable[LocalShard]) -> list[LocalShard]:
    """Return the shards that this rank writes. Replicas divide them by size, with the same result on every rank.

    A tensor without elements has no pieces, but is listed in the files.
    """
    loads: dict[int, list[int]] = {}
    mine = []
    for shard in shards:
        load = loads.setdefault(shard.replicas, [0] * shard.replicas)
        writer = load.index(min(load))
        load[writer] += shard.num_bytes
        if writer == shard.replica and (shard.pieces or 0 in shard.shape):
            mine.append(shard)
    return mine
