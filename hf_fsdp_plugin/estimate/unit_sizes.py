"""Sizes of a unit's shards, gathered parameters and communication buffers under each FSDP version.

These are the bytes that a rank allocates, and those that ranks exchange.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

import torch
from torch import nn

from hf_fsdp_plugin.backends.loading.weight_loader import master_dtype
from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, UnitPlan
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
        gathered: the output of the all-gather: the whole parameters in the compute dtype, with padding.
        whole_grads: the whole gradients of all trainable parameters in the compute dtype.
        flat_grad: the same with padding.
        last_grad: the whole gradient of the last trainable parameter.
        largest_grad: the largest whole gradient of one parameter.
        reduce_input: input of the reduce-scatter; the tensor of the all-reduce if nothing is sharded. 0 if no parameter
            is trainable.
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
    last_grad: int = 0
    largest_grad: int = 0
    reduce_input: int
    reduce_output: int
    grad_shard: int
    cast_grads: int = 0
    reshards: bool


def unit_sizes(plan: FsdpPlan, model: nn.Module) -> tuple[UnitSizes, ...]:
    """Return the sizes of all units of a plan, in its order.

    Args:
        model: the model that was planned, on any device.
    """
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
        result.append(replace(found[key], name=unit.name))
    return tuple(result)


def ignored_bytes(plan: FsdpPlan, model: nn.Module) -> Mapping[str, int]:
    """Return the bytes of parameters that are not sharded (``params``), and of the model's buffers (``buffers``)."""
    ignored = [model.get_parameter(name) for name in plan.ignored_parameters]
    return {"params": sum(p.nbytes for p in ignored), "buffers": sum(buffer.nbytes for buffer in model.buffers())}


def padded_shape(shape: Sequence[int], shards: int) -> tuple[int, ...]:
    """Return the shape of a parameter that FSDP2 pads to equal shards of its first dimension.

    See ``FSDPParam._init_sharded_param`` of torch 2.13.
    """
    return (ceil(shape[0] / shards) * shards, *shape[1:])


def flat_starts(numels: Iterable[int], aligned: int) -> tuple[list[int], int]:
    """Return where each parameter starts in a flat parameter, and where the last one ends, in elements.

    See ``FlatParamHandle._init_flat_param_and_metadata``.

    Args:
        numels: elements of each parameter, in order.
        aligned: number of elements to whose multiples each parameter is aligned; 1 for no alignment.
    """
    starts, total = [], 0
    for numel in numels:
        starts.append(ceil(total / aligned) * aligned)
        total = starts[-1] + numel
    return starts, total


def _dtypes(plan: FsdpPlan, parameter: nn.Parameter) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Return the dtypes in which a parameter is stored and gathered, and in which its gradient is reduced.

    Parameters that are not floating-point numbers, such as quantized ones, are not cast.
    """
    stored = master_dtype(plan, parameter)
    compute = (torch_dtype(plan.precision.param) or stored) if parameter.is_floating_point() else stored
    return stored, compute, torch_dtype(plan.precision.reduce) or compute


def _fsdp2(plan: FsdpPlan, unit: UnitPlan, parameters: list[nn.Parameter], fp32: Collection[int]) -> UnitSizes:
    """FSDP2 splits each parameter on dim 0, and pads the shards to one size.

    Parameters of several dtypes are gathered as bytes, and their gradients are reduced in one dtype.
    """
    num = plan.mesh.shard
    gradient_dtypes: set[torch.dtype] = set()
    shards: list[Shard] = []
    cast, gathered, whole, flat, reduced, grads, cast_grads = 0, 0, [0], 0, 0, 0, 0
    for parameter in parameters:
        stored, compute, reduce = _dtypes(plan, parameter)
        if id(parameter) in fp32:
            compute, reduce = torch.float32, torch_dtype(plan.precision.reduce) or compute
        shape = padded_shape(parameter.shape, num)
        numel, padded = prod(shape), prod(shape) // num
        shards.append(
            Shard(
                shape=(min(shape[0] // num, parameter.shape[0]), *parameter.shape[1:]), whole=tuple(parameter.shape),
                numel=padded, dtype=stored, trainable=parameter.requires_grad,
            )
        )  # fmt: skip
        cast += padded * compute.itemsize if compute != stored else 0
        gathered += numel * compute.itemsize
        if parameter.requires_grad:
            whole.append(parameter.numel() * compute.itemsize)
            flat += numel * compute.itemsize
            reduced += numel * reduce.itemsize
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
        whole_grads=sum(whole),
        flat_grad=flat,
        last_grad=whole[-1],
        largest_grad=max(whole),
        reduce_input=reduced,
        reduce_output=reduced // num,
        grad_shard=grads,
        cast_grads=cast_grads if len(gradient_dtypes) > 1 else 0,
        reshards=unit.reshard_after_forward,
    )


def _fsdp1(plan: FsdpPlan, unit: UnitPlan, parameters: list[nn.Parameter]) -> UnitSizes:
    """FSDP1 concatenates the parameters of a unit, and pads them to a multiple of the ranks.

    With ``use_orig_params``, it aligns each parameter to 16 bytes, pads also without sharding, for all ranks of its
    process group, and the optimizer updates views of the flat shard; otherwise the flat shard itself. Gradients of
    frozen parameters in a trained unit are reduced, too.
    """
    num, is_sharded = plan.mesh.shard, STRATEGIES[plan.strategy].is_sharded
    stored, compute, reduce = _dtypes(plan, parameters[0]) if parameters else (torch.float32,) * 3
    trainable = any(p.requires_grad for p in parameters)
    aligned = _ALIGNMENT // compute.itemsize if plan.use_orig else 1
    starts, total = flat_starts((parameter.numel() for parameter in parameters), aligned)
    total += -total % (plan.world_size if num == 1 and plan.use_orig else num)
    local = total // num
    if plan.use_orig:
        shards = tuple(_views(parameters, starts, local, stored))
    else:
        shards = (Shard(shape=(local,), whole=(total,), numel=local, dtype=stored, trainable=trainable),)
    casts = compute != stored
    # Without sharding, the flat parameter is used in place, or its copy, which autograd keeps if it is not cast.
    copies = casts or (plan.offload_params and plan.device_type != "cpu")
    return UnitSizes(
        name=unit.name,
        shards=shards if total else (),
        params=local * stored.itemsize,
        compute_shard=local * compute.itemsize if casts and is_sharded else 0,
        gathered=total * compute.itemsize if is_sharded or copies else 0,
        whole_grads=sum(p.numel() for p in parameters if p.requires_grad) * compute.itemsize,
        flat_grad=total * compute.itemsize if trainable else 0,
        reduce_input=total * reduce.itemsize if trainable else 0,
        reduce_output=local * reduce.itemsize if trainable else 0,
        grad_shard=local * stored.itemsize if trainable else 0,
        reshards=unit.reshard_after_forward or (not is_sharded and casts),
    )


def _views(parameters: list[nn.Parameter], starts: list[int], local: int, stored: torch.dtype) -> Iterator[Shard]:
    """Yield the parts of the parameters in the flat shard of the rank that has the largest part of one of them."""

    def part(index: int, rank: int) -> int:
        """Return the elements of a parameter that are in the shard of a rank."""
        end = min(starts[index] + parameters[index].numel(), (rank + 1) * local)
        return max(0, end - max(starts[index], rank * local))

    if not parameters:
        return
    largest = max(range(len(parameters)), key=lambda index: parameters[index].numel())
    first = starts[largest] // local
    rank = max((first, first + 1), key=lambda rank: part(largest, rank))
    for index, parameter in enumerate(parameters):
        if numel := part(index, rank):
            yield Shard(
                shape=(numel,), whole=tuple(parameter.shape), numel=numel, dtype=stored,
                trainable=parameter.requires_grad,
            )  # fmt: skip
