"""The bytes of a unit's shards, gathered parameters and communication buffers under each FSDP version.

A rank allocates them, or ranks exchange them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod

import torch
from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, UnitPlan, torch_dtype
from hf_fsdp_plugin.plan.padding import padded_shape
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.tools.plan.estimate.divided import divided, dividing_axis
from hf_fsdp_plugin.tools.plan.estimate.types import Axis
from hf_fsdp_plugin.torch_private.modules import local_tensor

_ALIGNMENT = 16
"""Bytes to which FSDP1 aligns each parameter in a flat parameter (``_get_aligned_numel`` of ``_flat_param.py``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterShard:
    """One tensor that the optimizer updates on a rank.

    Attributes:
        shape: shape of the shard of rank 0, which has the largest one.
        whole: shape of the whole parameter.
        numel: elements that are allocated, with padding.
        axis: the axis that divides the parameter before FSDP does.
    """

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    numel: int
    dtype: torch.dtype
    trainable: bool
    axis: Axis | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitBytes:
    """Bytes of one unit on one rank.

    Attributes:
        shards: what the optimizer updates.
        params: what the rank stores between steps, with padding.
        compute_shard: this rank's input of the all-gather in the compute dtype; 0 if the shard itself is the input.
        gathered: the output of the all-gather: the whole parameters in the compute dtype, with padding.
        whole_grads: the whole gradients of all trainable parameters in the compute dtype.
        flat_grad: these gradients as one tensor, with padding.
        last_grad: the whole gradient of the last trainable parameter.
        largest_grad: the largest whole gradient of one parameter.
        reduce_input: input of the reduce-scatter; the tensor of the all-reduce if nothing is sharded. 0 if no parameter
            is trainable.
        reduce_output: its output, in the dtype of the reduction.
        grad_shard: the gradients that the optimizer reads.
        cast_grads: copies of gradients in the dtype of the reduction, which the CPU makes for all gradients of other
            dtypes before the reduce-scatter if a unit has gradients of several dtypes.
        reshards: whether the gathered parameters are freed after forward.
        num_shards: number of ranks that have a shard each.
    """

    name: str
    num_shards: int
    shards: tuple[ParameterShard, ...]
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


def unit_bytes(plan: FsdpPlan, model: nn.Module) -> tuple[UnitBytes, ...]:
    """Return the sizes of all units of a plan, in its order.

    Args:
        model: the model that was planned, whole; on the meta device if a tensor or expert axis divides it.
    """
    if plan.mesh.has_divided_layers:
        with divided(plan, model) as rank:
            return _sizes(plan, rank.model)
    return _sizes(plan, model)


def _sizes(plan: FsdpPlan, model: nn.Module) -> tuple[UnitBytes, ...]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    fp32 = {id(parameters[name]) for name in plan.fp32_parameters}
    fp8 = {id(weight) for weight in fp8_gathered(plan, model)}
    found: dict[object, UnitBytes] = {}
    result = []
    for unit in plan.units:
        own = [parameters[name] for name in unit.parameters]
        kinds = tuple(
            (p.shape, local_tensor(p).shape, p.dtype, p.requires_grad, id(p) in fp32, id(p) in fp8) for p in own
        )
        key = (unit.reshard_after_forward, unit.name == "", kinds)
        if key not in found:
            found[key] = _fsdp1(plan, unit, own) if plan.backend == "fsdp1" else _fsdp2(plan, unit, own, fp32, fp8)
        result.append(replace(found[key], name=unit.name))
    return tuple(result)


def fp8_gathered(plan: FsdpPlan, model: nn.Module) -> list[torch.Tensor]:
    """Return the weights that are all-gathered in fp8: those of the linear layers that Accelerate converts by default.

    Args:
        model: the model that was planned, before its layers are converted.
    """
    if not (plan.spec.uses_fp8 and plan.spec.fp8.all_gather and plan.fp8_backend == "ao" and plan.backend == "fsdp2"):
        return []
    from accelerate.utils.ao import filter_linear_layers, find_first_last_linear_layers  # few predictions need it

    others = [*find_first_last_linear_layers(model)]
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [module.weight for name, module in layers if filter_linear_layers(module, name, others)]


def ignored_bytes(plan: FsdpPlan, model: nn.Module) -> Mapping[str, int]:
    """Return the bytes of parameters that are not sharded (``params``), and of the model's buffers (``buffers``)."""
    ignored = [model.get_parameter(name) for name in plan.ignored_parameters]
    return {"params": sum(p.nbytes for p in ignored), "buffers": sum(buffer.nbytes for buffer in model.buffers())}


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
    stored = plan.precision.stored_dtype(parameter)
    compute = (torch_dtype(plan.precision.param) or stored) if parameter.is_floating_point() else stored
    return stored, compute, torch_dtype(plan.precision.reduce) or compute


def _fsdp2(
    plan: FsdpPlan, unit: UnitPlan, parameters: list[nn.Parameter], fp32: Collection[int], fp8: Collection[int]
) -> UnitBytes:
    """FSDP2 splits each parameter on dim 0, and pads the shards to one size.

    It splits the part of a parameter that a tensor or expert axis leaves to this rank. Parameters of several dtypes are
    gathered as bytes, and their gradients are reduced in one dtype.

    Args:
        fp32, fp8: ids of the parameters that are gathered in these dtypes. Gradients are never in fp8.
    """
    mesh, of_experts = plan.mesh, bool(parameters) and dividing_axis(parameters[0]) == "expert"
    num = mesh.num_expert_shards if of_experts else mesh.num_shards
    shards: list[ParameterShard] = []
    sums = Counter(compute_shard=0, gathered=0, flat_grad=0, reduce_input=0, grad_shard=0, cast_grads=0)
    whole, gradient_dtypes = [0], set()
    for parameter in parameters:
        stored, compute, reduce = _dtypes(plan, parameter)
        if id(parameter) in fp32:
            compute, reduce = torch.float32, torch_dtype(plan.precision.reduce) or torch.float32
        local = local_tensor(parameter)
        shape = padded_shape(local.shape, num)
        numel, padded = prod(shape), prod(shape) // num
        own = (min(shape[0] // num, local.shape[0]), *local.shape[1:])
        shards.append(
            ParameterShard(
                shape=own,
                whole=tuple(parameter.shape),
                numel=padded,
                dtype=stored,
                trainable=parameter.requires_grad,
                axis=dividing_axis(parameter),
            )
        )
        gathered = torch.float8_e4m3fn if id(parameter) in fp8 else compute
        sums["compute_shard"] += padded * gathered.itemsize if gathered != stored else 0
        sums["gathered"] += numel * gathered.itemsize
        if parameter.requires_grad:
            whole.append(local.numel() * compute.itemsize)
            sums["flat_grad"] += numel * compute.itemsize
            sums["reduce_input"] += numel * reduce.itemsize
            sums["grad_shard"] += padded * stored.itemsize
            # Autograd casts a gradient to a narrower dtype of the reduction.
            gradient_dtypes.add(compute if compute.itemsize <= reduce.itemsize else reduce)
            sums["cast_grads"] += local.numel() * reduce.itemsize if compute.itemsize < reduce.itemsize else 0
    if len(gradient_dtypes) < 2:
        sums["cast_grads"] = 0
    return UnitBytes(
        name=unit.name,
        num_shards=num,
        shards=tuple(shards),
        params=sum(shard.numel * shard.dtype.itemsize for shard in shards),
        whole_grads=sum(whole),
        last_grad=whole[-1],
        largest_grad=max(whole),
        reduce_output=sums["reduce_input"] // num,
        reshards=unit.reshard_after_forward,
        **sums,
    )


def _fsdp1(plan: FsdpPlan, unit: UnitPlan, parameters: list[nn.Parameter]) -> UnitBytes:
    """FSDP1 concatenates the parameters of a unit, and pads them to a multiple of the ranks.

    With ``use_orig_params``, it aligns each parameter to 16 bytes, pads also without sharding, for all ranks of its
    process group, and the optimizer updates views of the flat shard; otherwise the flat shard itself. Gradients of
    frozen parameters in a trained unit are reduced, too.
    """
    num, is_sharded = plan.mesh.num_shards, STRATEGIES[plan.strategy].is_sharded
    stored, compute, reduce = _dtypes(plan, parameters[0]) if parameters else (torch.float32,) * 3
    trainable = any(p.requires_grad for p in parameters)
    aligned = _ALIGNMENT // compute.itemsize if plan.use_orig else 1
    starts, total = flat_starts((parameter.numel() for parameter in parameters), aligned)
    total += -total % (plan.world_size if num == 1 and plan.use_orig else num)
    local = total // num
    shards = [ParameterShard(shape=(local,), whole=(total,), numel=local, dtype=stored, trainable=trainable)]
    if plan.use_orig and total:
        # The views of the flat shard on the rank that has the largest part of the largest parameter.
        def part(at: int, rank: int) -> int:
            """Return the elements of a parameter that are in the shard of a rank."""
            end = min(starts[at] + parameters[at].numel(), (rank + 1) * local)
            return max(0, end - max(starts[at], rank * local))

        largest = max(range(len(parameters)), key=lambda at: parameters[at].numel())
        first = starts[largest] // local
        rank = max((first, first + 1), key=lambda rank: part(largest, rank))
        shards = [
            ParameterShard(shape=(numel,), whole=tuple(p.shape), numel=numel, dtype=stored, trainable=p.requires_grad)
            for at, p in enumerate(parameters)
            if (numel := part(at, rank))
        ]
    casts = compute != stored
    # Without sharding, the flat parameter is used in place, or its copy, which autograd keeps if it is not cast.
    copies = casts or (plan.offload_params and plan.device_type != "cpu")
    trained = total if trainable else 0
    return UnitBytes(
        name=unit.name,
        num_shards=num,
        shards=tuple(shards) if total else (),
        params=local * stored.itemsize,
        compute_shard=local * compute.itemsize if casts and is_sharded else 0,
        gathered=total * compute.itemsize if is_sharded or copies else 0,
        whole_grads=sum(p.numel() for p in parameters if p.requires_grad) * compute.itemsize,
        flat_grad=trained * compute.itemsize,
        reduce_input=trained * reduce.itemsize,
        reduce_output=trained // num * reduce.itemsize,
        grad_shard=trained // num * stored.itemsize,
        reshards=unit.reshard_after_forward or (not is_sharded and casts),
    )
