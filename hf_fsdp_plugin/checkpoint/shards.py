"""What this rank holds of a sharded model and its optimizer, as boxes of whole tensors. No communication.

torch's own way (``get_model_state_dict``) gathers every FSDP1 parameter to cut it anew along its first axis. An FSDP1
shard is a run of each flattened parameter, and a run is a few boxes: so both versions are told alike, from where the
shards lie in memory, for whoever writes or fills them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, Replicate

from hf_fsdp_plugin.backends.fsdp2 import reshard
from hf_fsdp_plugin.checkpoint.formats.boxes import Box, flat_range, whole
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import CheckpointError, Problem
from hf_fsdp_plugin.torch_private import fsdp1
from hf_fsdp_plugin.torch_private.functions import compute_local_shape_and_global_offset
from hf_fsdp_plugin.torch_private.modules import buffers, non_persistent_buffers


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a whole tensor and the memory on this rank that holds it, shaped as the box."""

    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Held:
    """This rank's part of one tensor.

    Attributes:
        shape: of the whole tensor.
        replica, replicas: of how many ranks with the same part this is which. One of them has to write it.
        frozen: a parameter that needs no gradient.
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


@dataclass(frozen=True, slots=True)
class ModelShards:
    """Parameters and persistent buffers under canonical names.

    Attributes:
        aliases: further names of tied parameters -> the name in ``tensors``.
    """

    tensors: tuple[Held, ...]
    aliases: Mapping[str, str]

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        groups: dict[str, list[str]] = {}
        for alias, name in self.aliases.items():
            groups.setdefault(name, [name]).append(alias)
        return tuple(tuple(group) for group in groups.values())


@dataclass(frozen=True, slots=True)
class OptimizerShards:
    """An optimizer's state, keyed by the parameters' canonical names.

    Attributes:
        state: parameter -> key -> this rank's part of a tensor, or a plain value.
        groups: the optimizer's parameter groups with names for parameters.
    """

    state: Mapping[str, Mapping[str, Held | Any]]
    groups: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """How one parameter is cut, and so everything that is cut like it.

    Attributes:
        start, numel: the parameter's run within the local tensor, where that holds a whole FSDP1 unit; ``start`` is
            ``None`` where the local tensor is this parameter's alone.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    replica: int
    replicas: int
    frozen: bool = False
    start: int | None = None
    numel: int = 0

    def hold(self, name: str, local: torch.Tensor) -> Held:
        """``local`` (the parameter's shard, or a tensor laid out like it) as a part of a whole tensor ``name``."""
        flat = local.detach().reshape(-1) if local.is_contiguous() else None
        if self.start is not None:
            assert flat is not None, "FSDP1 shards are contiguous"
            flat = flat.narrow(0, self.start, self.numel)
        pieces, done = [], 0
        for box in self.boxes:
            if flat is None:  # one box of a DTensor with another memory format
                pieces.append(Piece(box, local.detach()))
            else:
                pieces.append(Piece(box, flat.narrow(0, done, box.numel).view(box.sizes)))
            done += box.numel
        return Held(name, local.dtype, self.shape, tuple(pieces), self.replica, self.replicas, self.frozen)


@dataclass(frozen=True, slots=True)
class Cuts:
    """Every parameter of a model, found by the objects that stand for it.

    Attributes:
        of: ``id`` of a parameter object, as an optimizer holds it -> the parameters in it; more than one for FSDP1's
            flat parameters.
        locals: name -> this rank's memory of the parameter (or of the unit that it is in).
    """

    of: dict[int, tuple[Cut, ...]] = field(default_factory=dict)
    locals: dict[str, tuple[Cut, torch.Tensor]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def model_shards(model: nn.Module) -> ModelShards:
    """Parameters and persistent buffers. Gathered parameters are freed first."""
    cuts = find_cuts(model)
    tensors = [cut.hold(name, local) for name, (cut, local) in cuts.locals.items()]
    tensors += [_whole_on_every_rank(name, buffer) for name, buffer in persistent_buffers(model)]
    return ModelShards(tuple(tensors), cuts.aliases)


def optimizer_shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerShards:
    """State and groups of an optimizer that holds parameters of ``model``.

    Raises:
        CheckpointError: an optimizer keeps tensors for sharded parameters that are laid out like none of them.
    """
    cuts = find_cuts(model)
    state: dict[str, dict[str, Any]] = {}
    problems: list[Problem] = []
    groups = []
    for group in optimizer.param_groups:
        names: list[str] = []
        for parameter in group["params"]:
            for cut in cuts.of.get(id(parameter), ()):
                names.append(cut.name)
                entries = optimizer.state.get(parameter, {})
                held = {key: _state_entry(cut, key, value, parameter, problems) for key, value in entries.items()}
                if held:
                    state[cut.name] = held
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": names})
    if problems:
        raise CheckpointError(problems)
    return OptimizerShards(state, tuple(groups))


def _state_entry(cut: Cut, key: str, value: Any, parameter: torch.Tensor, problems: list[Problem]) -> Any:
    """A tensor cut like the parameter, a scalar that is the same everywhere, or a plain value."""
    if not isinstance(value, torch.Tensor):
        return value
    name = f"state.{cut.name}.{key}"
    own = _local(parameter)
    local = _local(value)
    if local.shape == own.shape or (cut.start is not None and local.numel() == own.numel() > 1):
        return cut.hold(name, local)
    if local.numel() == 1:
        return Held(name, local.dtype, tuple(local.shape), (Piece(whole(local.shape), local.detach()),))
    problems.append(
        Problem(
            severity="error",
            message=(
                f"the optimizer keeps '{key}' of shape {tuple(local.shape)} for {cut.name}, whose shard has shape "
                f"{tuple(own.shape)}: it cannot be told which part of the whole it is."
            ),
            fix="Save with fsdp_state_dict_type: LOCAL_STATE_DICT (readable at the same world size and mesh only).",
        )
    )
    return None


def find_cuts(model: nn.Module) -> Cuts:
    """Where every parameter's shard lies on this rank. Parameters that are gathered are freed first."""
    reshard(model)
    for module in model.modules():
        if isinstance(module, FSDP):
            fsdp1.free_gathered(module)
    cuts = Cuts()
    module_names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    in_flat: set[int] = set()
    for module in model.modules():
        flat = fsdp1.flat_parameter(module) if isinstance(module, FSDP) else None
        if flat is not None:
            in_flat.update(_flat_cuts(cuts, module, flat, module_names))
    names: dict[int, str] = {}
    for raw_name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in in_flat or isinstance(parameter, FlatParameter):
            continue
        name = canonical_name(raw_name)
        if names.setdefault(id(parameter), name) != name:
            cuts.aliases[name] = names[id(parameter)]
            continue
        cut = _dtensor_cut(name, parameter) if isinstance(parameter, DTensor) else _uncut(name, parameter)
        cuts.of[id(parameter)] = (cut,)
        cuts.locals[name] = (cut, _local(parameter))
    return cuts


def _flat_cuts(cuts: Cuts, unit: nn.Module, flat: Any, module_names: Mapping[int, str]) -> Iterator[int]:
    """The parameters in one FSDP1 unit; yields the ids of the objects that stand for them in the module tree."""
    shard = fsdp1.local_shard(flat)
    group = fsdp1.replicate_group(unit)
    replica, replicas = (group.rank(), group.size()) if group is not None else (0, 1)

    def full_name(module: nn.Module, attribute: str) -> str:
        return canonical_name(f"{module_names[id(module)]}.{attribute}".lstrip("."))

    own: list[Cut] = []
    for member in fsdp1.members(flat):
        cut = Cut(
            name=full_name(member.module, member.attribute),
            shape=tuple(member.shape),
            boxes=tuple(flat_range(tuple(member.shape), member.start, member.stop)),
            replica=replica,
            replicas=replicas,
            frozen=not member.requires_grad,
            start=member.offset,
            numel=member.stop - member.start,
        )
        own.append(cut)
        cuts.locals[cut.name] = (cut, shard)
        if member.parameter is not None:
            # The original parameter is a view of its own run, so its state is laid out as that run alone.
            cuts.of[id(member.parameter)] = (replace(cut, start=None, numel=0),)
    cuts.of[id(flat)] = tuple(own)
    for shared in fsdp1.shared_members(flat):
        alias = full_name(shared.module, shared.attribute)
        cuts.aliases[alias] = full_name(shared.primary_module, shared.primary_attribute)
    yield from map(id, fsdp1.parameter_objects(flat))


def _dtensor_cut(name: str, parameter: DTensor) -> Cut:
    mesh, placements = parameter.device_mesh, parameter.placements
    sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    replica, replicas = 0, 1
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            replica = replica * mesh.size(axis) + mesh.get_local_rank(axis)
            replicas *= mesh.size(axis)
    box = Box(tuple(offsets), tuple(sizes))
    return Cut(
        name, tuple(parameter.shape), (box,) if box.numel else (), replica, replicas, not parameter.requires_grad
    )


def _uncut(name: str, tensor: torch.Tensor) -> Cut:
    shape = tuple(tensor.shape)
    frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    return Cut(name, shape, (whole(shape),), dist.get_rank(), dist.get_world_size(), frozen)


def _whole_on_every_rank(name: str, tensor: torch.Tensor) -> Held:
    return _uncut(name, tensor).hold(name, _local(tensor))


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Canonical name and buffer, for those that belong to the state dict."""
    for name, module in model.named_modules():
        for attribute, buffer in buffers(module).items():
            if buffer is not None and attribute not in non_persistent_buffers(module):
                yield canonical_name(f"{name}.{attribute}".lstrip(".")), buffer


def owned(tensors: Iterable[Held]) -> list[Held]:
    """Those that this rank has to write: replicas share them out by size, all by the same reckoning."""
    loads: dict[int, list[int]] = {}
    mine = []
    for held in tensors:
        load = loads.setdefault(held.replicas, [0] * held.replicas)
        writer = load.index(min(load))
        load[writer] += held.num_bytes
        if writer == held.replica and held.pieces:
            mine.append(held)
    return mine


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
