"""Clips gradients by their global norm, for parameters of several models, sharded by either FSDP version or not."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement

from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.torch_private import fsdp1
from hf_fsdp_plugin.torch_private.functions import is_sharded, scale_tensors, supports_cpu, tensor_norms

# The same constant as in torch's clip_grads_with_norm_.
_EPSILON = 1e-6

_Shards = tuple[tuple[dist.ProcessGroup, ...], torch.device | None]
"""Process groups over which a parameter is sharded, and the device on which it is computed."""

_PARAMETER_OF_OTHER_MODEL = Problem(
    code="FSDP-E611",
    message="clip_grad_norm_() was called with parameters that FSDP1 has sharded in a model that was not prepared, so "
    "the ranks that have the other shards are unknown.",
    fix="Pass the model to prepare(), or call clip_grad_norm_ of the model itself.",
)

_NORM_OF_ONE_RANK = Problem(
    code="FSDP-E611",
    message="get_total_norm() was called with gradients of FSDP1, of which each rank has a part. The result would be "
    "the norm of one rank's parts.",
    fix='Call accelerator.clip_grad_norm_(model.parameters(), float("inf")) on all ranks: it returns the norm of the '
    "whole gradients, and changes nothing.",
)


@dataclass(kw_only=True, slots=True)
class _Group:
    """Local gradients whose norms are reduced over the same process groups. Unsharded gradients have no group.

    ``dtype`` is that of the norms: equal on all ranks, also on those that have no gradient.
    """

    process_groups: tuple[dist.ProcessGroup, ...]
    device: torch.device | None
    dtype: torch.dtype = torch.float32
    gradients: list[torch.Tensor] = field(default_factory=list)


@torch.no_grad()
def clip_grad_norm(
    models: Collection[nn.Module], parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale the gradients of ``parameters`` so that their total norm is at most ``max_norm``. Collective.

    Accelerate supports the parameters of one whole model with the config's FSDP version. For a subset of them, for a
    second model or for models of both versions, it uses the norm of one rank's shards, or raises.

    Args:
        models: the prepared models, which are searched for FSDP1's flat parameters.
        parameters: the parameters whose gradients are clipped, in the same order on all ranks.
        norm_type: p of the p-norm; ``math.inf`` for the largest magnitude.

    Returns:
        The norm before clipping, a scalar that is equal on all ranks.
    """
    groups = _groups(models, parameters)
    # The first tensor is not made on the CPU: the host would wait for its copy to the device.
    norms = [_norm(group, norm_type) for group in groups] or [torch.zeros(())]
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    if math.isfinite(max_norm):
        factor = torch.clamp(max_norm / (total + _EPSILON), max=1.0)
        for device, gradients in _by_device(gradient for group in groups for gradient in group.gradients).items():
            on_device = factor.to(device)
            # One kernel scales tensors of the factor's dtype only. In fp16, small factors would be zero.
            narrow = [gradient for gradient in gradients if gradient.dtype is torch.bfloat16]
            others = [gradient for gradient in gradients if gradient.dtype is not torch.bfloat16]
            for tensors, by in ((narrow, on_device.bfloat16()), (others, on_device)):
                if tensors:
                    scale_tensors(tensors, by)
    return total


def check_whole_gradients(models: Collection[nn.Module], tensors: Sequence[torch.Tensor]) -> None:
    """Raise ``SpecError`` if FSDP1 has sharded one of the gradients. No communication."""
    sharded = {number for number, (over, _) in _flat_shards(models).items() if any(group.size() > 1 for group in over)}
    parameters = [parameter for model in models for parameter in model.parameters() if id(parameter) in sharded]
    gradients = {_address(parameter.grad) for parameter in parameters if parameter.grad is not None}
    # A rank without a part of the gradients must not continue alone.
    if parameters and (not tensors or any(_address(tensor) in gradients for tensor in tensors)):
        raise SpecError([_NORM_OF_ONE_RANK])


def _address(tensor: torch.Tensor) -> int | None:
    """Return the address of the memory that a tensor shares with its views; ``None`` for a DTensor."""
    return None if isinstance(tensor, DTensor) else tensor.untyped_storage().data_ptr()


def _by_device(tensors: Iterable[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    """Group tensors by device, so that each device needs one kernel launch instead of one per tensor."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return found


def _groups(models: Collection[nn.Module], parameters: Iterable[nn.Parameter]) -> list[_Group]:
    """Group gradients by the process groups over which their norms are reduced.

    A rank whose shard is empty has no gradient but still needs the group, because it must take part in the reduction.
    """
    flat = _flat_shards(models)
    known: dict[tuple[DeviceMesh, tuple[Placement, ...]], _Shards] = {}  # a model has few layouts of its parameters
    first: dict[tuple[int, ...], dist.ProcessGroup] = {}  # the experts have a mesh of their own, with the same ranks
    groups: dict[object, _Group] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(parameter, DTensor):
            layout = mesh, placements = parameter.device_mesh, parameter.placements
            if layout not in known:
                sharded = (mesh.get_group(axis) for axis, place in enumerate(placements) if is_sharded(place))
                over = tuple(first.setdefault(tuple(dist.get_process_group_ranks(group)), group) for group in sharded)
                known[layout] = over, torch.device(mesh.device_type)
            over, device = known[layout]
            gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        else:
            over, device = flat.get(id(parameter), ((), None))
            if device is None and fsdp1.is_flattened(parameter):
                raise SpecError([_PARAMETER_OF_OTHER_MODEL])
        # Norms of offloaded gradients are added up in host memory: the host need not wait for the device.
        if parameter.device.type == "cpu" and all(map(supports_cpu, over)):
            device = parameter.device
        group = groups.setdefault(over, _Group(process_groups=over, device=device))
        if parameter.dtype is torch.float64:
            group.dtype = torch.float64
        if gradient is not None and gradient.numel():  # an empty tensor has no largest magnitude
            group.gradients.append(torch.view_as_real(gradient) if gradient.is_complex() else gradient)
    return list(groups.values())


def _flat_shards(models: Collection[nn.Module]) -> dict[int, _Shards]:
    """Return ``id`` of each FSDP1 parameter -> shard group, if it is sharded, and device on which it is computed."""
    found: dict[int, _Shards] = {}
    for model in models:
        if isinstance(model, FSDPModule):
            continue  # it has no FSDP1 units, and a search in each step takes time
        for unit, flat in fsdp1.flat_units(model):
            group = fsdp1.shard_group(unit)
            shards = (group,) if group is not None else (), fsdp1.compute_device(unit)
            found.update((id(parameter), shards) for parameter in fsdp1.parameter_objects(flat))
    return found


def _norm(group: _Group, norm_type: float) -> torch.Tensor:
    """Return the norm of a group's gradients, reduced over all ranks that have a shard of them."""
    device = group.device or (group.gradients[0].device if group.gradients else torch.device("cpu"))
    norm = torch.zeros((), dtype=group.dtype, device=device)
    if group.gradients:
        norms = _by_device(tensor_norms(group.gradients, norm_type, dtype=group.dtype))
        stacked = [torch.stack(each).to(device) for each in norms.values()]
        norm = torch.linalg.vector_norm(stacked[0] if len(stacked) == 1 else torch.cat(stacked), norm_type)
    for process_group in group.process_groups:
        if math.isinf(norm_type):
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=process_group)
        else:
            norm = norm**norm_type
            dist.all_reduce(norm, group=process_group)
            norm = norm ** (1.0 / norm_type)
    return norm
