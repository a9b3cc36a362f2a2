"""Sizes of a unit's shards, gathered parameters and communication buffers under each FSDP version.

These are the bytes that a rank allocates. ``estimate/unit_sizes.py`` has the bytes that ranks exchange, by the same
rules of padding, except that FSDP1 without sharding pads what it all-reduces for all ranks of its process group. In
memory, where the shard group has one rank, these few elements are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod

import torch
from torch import nn

from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.plan.units import UnitPlan
from hf_fsdp_plugin.strategies import STRATEGIES

_ALIGNMENT = 16
"""Bytes to which FSDP1 aligns each parameter in a flat parameter (``_get_aligned_numel`` of ``_flat_param.py``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One tensor that the optimizer updates on a rank.

    Attributes:
        shape: of the shard on the rank with the largest one: rank 0.
        whole: shape of the whole parameter.
        numel: elements that are allocated, with padding.
    """

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSizes:
    """Bytes of one unit on one rank.

    Attributes:
        shards: what the optimizer updates.
        params: what the rank stores between steps, with padding.
        compute_shard: this rank's input of the all-gather in the compute dtype; 0 if the shard itself is the input.
        gathered: the whole parameters in the compute dtype, with padding.
        whole_grads: the whole gradients of all trainable parameters in the compute dtype.
        flat_grad: the same with padding.
        last_grad: the whole gradient of the last trainable parameter.
        largest_grad: the largest whole gradient of one parameter.
        reduce_input: input of the reduce-scatter; the tensor of the all-reduce if nothing is sharded.
        reduce_output: its output, in the dtype of the reduction.
        grad_shard: the gradients that the optimizer reads.
        cast_grads: copies of gradients in the dtype of the reduction, which the CPU makes for all gradients of other
            dtypes before the reduce-scatter if a unit has gradients of several dtypes.
        reshards: whether the gathered parameters are freed after forward.
    """

    name: str
    shards: tuple[Shard, ...]
    params: int
    compute_shard: int
    gathered: int
    whole_grads: int
    flat_grad: int
    last_grad: int
    largest_grad: int
    reduce_input: int
    reduce_output: int
    grad_shard: int
    cast_grads: int = 0
    reshards: bool


def unit_sizes(plan: FsdpPlan, model: nn.Module) -> tuple[UnitSizes, ...]:
    """Return the sizes of all units of a plan, in its order."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    fp32 = {id(parameters[name]) for name in plan.fp32_parameters}
    found: dict[object, UnitSizes] = {}
    result = []
    for unit in plan.units:
        own = [parameters[name] for name in unit.parameters]
        kinds = tuple((p.shape, p.dtype, p.requires_grad, id(p) in fp32) for p in own)
        key = (unit.reshard_after_forward, unit.name == "", kinds)
        if key not in found:
            found[key] = _fsdp1(plan, unit, own) if plan.backend == "fsdp1" else _fsdp2(plan, unit, own, fp32)
        result.append(_renamed(found[key], unit.name))
    return tuple(result)


def ignored_bytes(plan: FsdpPlan, model: nn.Module) -> Mapping[str, int]:
    """Return the bytes of parameters that are not sharded, of their gradients, and of the model's buffers."""
    ignored = [model.get_parameter(name) for name in plan.ignored_parameters]
    own, grads = _bytes(ignored), _bytes(p for p in ignored if p.requires_grad)
    return {"params": own, "grads": grads, "buffers": _bytes(model.buffers())}


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _renamed(sizes: UnitSizes, name: str) -> UnitSizes:
    return replace(sizes, name=name)


def _dtypes(plan: FsdpPlan, parameter: nn.Parameter) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Return the dtypes in which a parameter is stored, computed with, and its gradient is reduced."""
    is_float = parameter.is_floating_point()
    masters = plan.precision.master == "fp32" and parameter.requires_grad and is_float
    stored = torch.float32 if masters else parameter.dtype
    compute = (torch_dtype(plan.precision.param) or stored) if is_float else stored
    return stored, compute, torch_dtype(plan.precision.reduce) or compute


def _fsdp2(plan: FsdpPlan, unit: UnitPlan, parameters: list[nn.Parameter], fp32: Collection[int]) -> UnitSizes:
    """FSDP2 splits each parameter on dim 0, and pads the shards to one size (``FSDPParam._init_sharded_param``)."""
    num = plan.mesh.shard
    gradient_dtypes: set[torch.dtype] = set()
    cast_grads = 0
    shards, cast, gathered, whole, flat, last, largest, reduced_in, reduced_out, grads = [], 0, 0, 0, 0, 0, 0, 0, 0, 0
    for parameter in parameters:
        stored, compute, reduce = _dtypes(plan, parameter)
        if id(parameter) in fp32:
            compute, reduce = torch.float32, torch_dtype(plan.precision.reduce) or compute
        rows = ceil(parameter.shape[0] / num)
        shape = (min(rows, parameter.shape[0]), *parameter.shape[1:])
        padded = rows * prod(parameter.shape[1:])
        shard = Shard(
            shape=shape, whole=tuple(parameter.shape), numel=padded, dtype=stored, trainable=parameter.requires_grad
        )
        shards.append(shard)
        cast += padded * compute.itemsize if compute != stored else 0
        gathered += padded * num * compute.itemsize
        if parameter.requires_grad:
            last = parameter.numel() * compute.itemsize
            largest = max(largest, last)
            whole += last
            flat += padded * num * compute.itemsize
            reduced_in += padded * num * reduce.itemsize
            reduced_out += padded * reduce.itemsize
            grads += padded * stored.itemsize
            # Autograd casts a gradient to a narrower dtype of the reduction.
            gradient_dtypes.add(compute if compute.itemsize <= reduce.itemsize else reduce)
            cast_grads += parameter.numel() * reduce.itemsize if compute.itemsize < reduce.itemsize else 0
    return UnitSizes(
        name=unit.name,
        shards=tuple(shards),
        params=sum(shard.numel * shard.dtype.itemsize for shard in shards),
        compute_shard=cast,
        gathered=gathered,
        whole_grads=whole,
        flat_grad=flat,
        last_grad=last,
        largest_grad=largest,
        reduce_input=reduced_in,
        reduce_output=reduced_out,
        grad_shard=grads,
        cast_grads=cast_grads if len(gradient_dtypes) > 1 else 0,
        reshards=unit.reshard_after_forward,
    )


def _fsdp1(plan: FsdpPlan, unit: UnitPlan, parameters: list[nn.Parameter]) -> UnitSizes:
    """FSDP1 concatenates the parameters of a unit, aligns each to 16 bytes, and pads to a multiple of the ranks.

    The optimizer updates views of the flat shard (``use_orig_params``), or the flat shard itself.
    """
    num, is_sharded = plan.mesh.shard, STRATEGIES[plan.strategy].is_sharded
    stored, compute, reduce = _dtypes(plan, parameters[0]) if parameters else (torch.float32,) * 3
    trainable = any(p.requires_grad for p in parameters)
    aligned = _ALIGNMENT // compute.itemsize if plan.use_orig else 0
    total, starts = 0, []
    for parameter in parameters:
        total += -total % aligned if aligned else 0
        starts.append(total)
        total += parameter.numel()
    total += -total % num
    local = total // num
    if plan.use_orig:
        shards = tuple(_views(parameters, starts, local, stored))
    else:
        shards = (Shard(shape=(local,), whole=(total,), numel=local, dtype=stored, trainable=trainable),)
    casts = compute != stored
    whole_grads = sum(p.numel() for p in parameters if p.requires_grad) * compute.itemsize
    # Without sharding, the flat parameter is used in place, or its copy, which autograd keeps if it is not cast.
    copies = casts or (plan.offload_params and plan.device_type != "cpu")
    gathered = total * compute.itemsize if is_sharded or copies else 0
    return UnitSizes(
        name=unit.name,
        shards=shards if total else (),
        params=local * stored.itemsize,
        compute_shard=local * compute.itemsize if casts and is_sharded else 0,
        gathered=gathered,
        whole_grads=whole_grads,
        flat_grad=total * compute.itemsize if trainable else 0,
        last_grad=0,
        largest_grad=0,
        reduce_input=total * reduce.itemsize if trainable else 0,
        reduce_output=local * reduce.itemsize if trainable else 0,
        grad_shard=local * stored.itemsize if trainable else 0,
        reshards=unit.reshard_after_forward or (not is_sharded and casts),
    )


def _views(parameters: list[nn.Parameter], starts: list[int], local: int, stored: torch.dtype) -> Iterator[Shard]:
    """Yield the parts of the parameters in the flat shard of the rank that has the largest part of one of them."""
    largest = max(range(len(parameters)), key=lambda at: parameters[at].numel(), default=0)
    rank = max(
        (starts[largest] // local, starts[largest] // local + 1),
        key=lambda rank: _overlap(starts[largest], parameters[largest].numel(), rank, local),
    )
    for start, parameter in zip(starts, parameters, strict=True):
        part = _overlap(start, parameter.numel(), rank, local)
        if part:
            yield Shard(
                shape=(part,),
                whole=tuple(parameter.shape),
                numel=part,
                dtype=stored,
                trainable=parameter.requires_grad,
            )


def _overlap(start: int, numel: int, rank: int, local: int) -> int:
    """Return the elements of a parameter that are in the shard of a rank."""
    return max(0, min(start + numel, (rank + 1) * local) - max(start, rank * local))
