"""Describes how a sharded model's parameters are laid out on this rank. No communication.

torch's ``get_model_state_dict`` gathers every FSDP1 parameter and shards it again along dim 0. This module needs no
gather: an FSDP1 shard is a contiguous range of each flattened parameter, and such a range consists of a few boxes of
the whole tensor. Shards of both FSDP versions are described by such boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, Replicate

from hf_fsdp_plugin.backends.fsdp2 import reshard
from hf_fsdp_plugin.backends.optimizer import JointModels
from hf_fsdp_plugin.backends.whole_state import check_not_whole
from hf_fsdp_plugin.checkpoint.formats.boxes import Box, flat_range, whole
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.torch_private import fsdp1
from hf_fsdp_plugin.torch_private.functions import compute_local_shape_and_global_offset


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
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    replica: int = 0
    replicas: int = 1
    frozen: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(piece.box.numel for piece in self.pieces) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """``float32``, ``bfloat16``, …"""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """How one parameter, and every tensor laid out like it, is sharded.

    Attributes:
        start: first element of the parameter's range, if the local tensor holds a whole FSDP1 unit; ``None`` if
            the local tensor holds only this parameter.
        numel: number of elements of the range.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    replica: int
    replicas: int
    frozen: bool = False
    start: int | None = None
    numel: int = 0

    def local_shard(self, name: str, local: torch.Tensor) -> LocalShard:
        """Return ``local`` (the parameter's shard, or a tensor laid out like it) as a part of a whole tensor."""
        flat = local.detach().reshape(-1) if local.is_contiguous() else None
        if self.start is not None:
            assert flat is not None, "FSDP1 shards are contiguous"
            flat = flat.narrow(0, self.start, self.numel)
        pieces, done = [], 0
        for box in self.boxes:
            if flat is None:  # one box of a DTensor with a different memory format
                pieces.append(Piece(box, local.detach()))
            else:
                pieces.append(Piece(box, flat.narrow(0, done, box.numel).view(box.sizes)))
            done += box.numel
        return LocalShard(name, local.dtype, self.shape, tuple(pieces), self.replica, self.replicas, self.frozen)


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The layouts of all parameters of a model.

    Attributes:
        by_id: ``id`` of an optimizer's parameter object -> the parameters in it. FSDP1's flat parameters contain
            several.
        local: name -> layout, and this rank's memory of the parameter (or of its whole FSDP1 unit).
        aliases: other names of tied parameters -> the name in ``local``.
    """

    by_id: dict[int, tuple[ParameterLayout, ...]] = field(default_factory=dict)
    local: dict[str, tuple[ParameterLayout, torch.Tensor]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def model_layout(model: nn.Module) -> ModelLayout:
    """Return the layouts of this rank's shards of all parameters. Gathered parameters are resharded first."""
    for each in model.values() if isinstance(model, JointModels) else (model,):
        check_not_whole(each, "the model was saved, loaded or averaged")
        reshard(each)
    layout = ModelLayout()
    module_names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        module_names.setdefault(id(module), []).append(canonical_name(name))
    in_flat: set[int] = set()
    for module in model.modules():
        flat = fsdp1.flat_parameter(module) if isinstance(module, FSDP) else None
        if flat is not None:
            in_flat.update(_add_flat_parameter(layout, module, flat, module_names))
    names: dict[int, str] = {}
    for raw_name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in in_flat or isinstance(parameter, FlatParameter):
            continue
        name = canonical_name(raw_name)
        if names.setdefault(id(parameter), name) != name:
            layout.aliases[name] = names[id(parameter)]
            continue
        own = _dtensor_layout(name, parameter) if isinstance(parameter, DTensor) else replicated_layout(name, parameter)
        layout.by_id[id(parameter)] = (own,)
        layout.local[name] = (own, local_tensor(parameter))
    return layout


def _add_flat_parameter(
    layout: ModelLayout, unit: nn.Module, flat: Any, module_names: Mapping[int, Sequence[str]]
) -> Iterator[int]:
    """Add the parameters of one FSDP1 unit; yield the ids of the objects that represent them in the module tree."""
    shard = fsdp1.local_shard(flat)
    group = fsdp1.replicate_group(unit)
    replica, replicas = (group.rank(), group.size()) if group is not None else (0, 1)

    def full_names(module: nn.Module, attribute: str) -> list[str]:
        """Return a name for each place of the module, of which the last is that of the layout."""
        return [f"{name}.{attribute}".lstrip(".") for name in module_names[id(module)]]

    in_unit: list[ParameterLayout] = []
    for member in fsdp1.members(flat):
        *others, name = full_names(member.module, member.attribute)
        layout.aliases.update(dict.fromkeys(others, name))
        own = ParameterLayout(
            name=name,
            shape=tuple(member.shape),
            boxes=tuple(flat_range(tuple(member.shape), member.start, member.stop)),
            replica=replica,
            replicas=replicas,
            frozen=not member.requires_grad,
            start=member.offset,
            numel=member.stop - member.start,
        )
        in_unit.append(own)
        layout.local[own.name] = (own, shard)
        if member.parameter is not None:
            # The original parameter is a view of its range, and its state has the size of the range.
            layout.by_id[id(member.parameter)] = (replace(own, start=None, numel=0),)
    layout.by_id[id(flat)] = tuple(in_unit)
    for place, primary_place in fsdp1.tied_places(flat):
        layout.aliases.update(dict.fromkeys(full_names(*place), full_names(*primary_place)[-1]))
    yield from map(id, fsdp1.parameter_objects(flat))


def _dtensor_layout(name: str, parameter: DTensor) -> ParameterLayout:
    mesh, placements = parameter.device_mesh, parameter.placements
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    replica, replicas = 0, 1
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            replica = replica * mesh.size(axis) + mesh.get_local_rank(axis)
            replicas *= mesh.size(axis)
    box = Box(tuple(offsets), tuple(sizes))
    boxes = (box,) if box.numel else ()
    return ParameterLayout(name, tuple(parameter.shape), boxes, replica, replicas, not parameter.requires_grad)


def replicated_layout(name: str, tensor: torch.Tensor) -> ParameterLayout:
    """Return the layout of a tensor that is whole on every rank."""
    shape = tuple(tensor.shape)
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return ParameterLayout(name, shape, (whole(shape),), dist.get_rank(), dist.get_world_size(), frozen)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
