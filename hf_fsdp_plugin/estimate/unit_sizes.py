"""Sizes of the buffers in which a unit's parameters are gathered and its gradients are reduced, with their padding.

These are the bytes that ranks exchange, which the tests compare with counted collectives. ``memory/shards.py`` has what
a rank allocates for the same units, with the shards of each parameter and their dtypes. The two differ for FSDP1
without sharding, which pads the flat parameter that it all-reduces for all ranks of its process group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import nn

from hf_fsdp_plugin.backends.load import master_dtype
from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.plan.units import UnitPlan

_ALIGNMENT_BYTES = 16
"""FSDP1 with ``use_orig_params`` aligns each parameter (``_get_aligned_numel`` of ``torch/distributed/fsdp``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSizes:
    """Bytes of one unit's collectives.

    Attributes:
        gather_bytes: output of the all-gather: all parameters in the dtype of the computation, padded.
        reduce_bytes: input of the reduce-scatter: all gradients in the dtype of the reduction, padded. 0 if no
            parameter is trainable.
    """

    gather_bytes: int
    reduce_bytes: int


def unit_sizes(plan: FsdpPlan, unit: UnitPlan, model: nn.Module) -> UnitSizes:
    """Return the sizes of a unit's collectives.

    FSDP2 pads the first dimension of each parameter to a multiple of the shard size. FSDP1 pads the flat parameter, and
    aligns each parameter in it if ``use_orig_params`` is set; it also reduces the gradients of frozen parameters in it.

    Args:
        model: the model that was planned, on any device.
    """
    parameters = [model.get_parameter(name) for name in unit.parameters]
    if plan.backend == "fsdp1":
        return _flat_sizes(plan, parameters)
    fp32 = frozenset(plan.fp32_parameters)
    return _separate_sizes(plan, parameters, [name in fp32 for name in unit.parameters])


def padded_numel(shape: Sequence[int], shards: int) -> int:
    """Return the number of elements of a parameter that is padded to equal shards of its first dimension."""
    if not shape:
        return 1
    rest = 1
    for size in shape[1:]:
        rest *= size
    return ceil(shape[0] / shards) * shards * rest


def flat_numel(numels: Iterable[int], shards: int, *, aligned: int) -> int:
    """Return the number of elements of a flat parameter, as in ``FlatParamHandle._init_flat_param_and_metadata``.

    Args:
        numels: elements of each parameter, in order.
        shards: number of ranks of the handle's process group.
        aligned: number of elements to whose multiples each parameter is aligned; 0 for no alignment and no padding.
    """
    total = 0
    for numel in numels:
        total = ceil(total / aligned) * aligned + numel if aligned else total + numel
    return ceil(total / shards) * shards if aligned else total


def _separate_sizes(plan: FsdpPlan, parameters: list[nn.Parameter], in_fp32: list[bool]) -> UnitSizes:
    """Parameters of several dtypes are gathered as bytes, and their gradients reduced in one dtype."""
    shards = plan.mesh.shard
    gather = reduce = 0
    for parameter, is_fp32 in zip(parameters, in_fp32, strict=True):
        numel = padded_numel(parameter.shape, shards)
        compute = _compute_dtype(plan, parameter)
        gather += numel * (torch.float32 if is_fp32 else compute).itemsize
        if parameter.requires_grad:
            reduce += numel * (torch_dtype(plan.precision.reduce) or compute).itemsize
    return UnitSizes(gather_bytes=gather, reduce_bytes=reduce)


def _flat_sizes(plan: FsdpPlan, parameters: list[nn.Parameter]) -> UnitSizes:
    if not parameters:
        return UnitSizes(gather_bytes=0, reduce_bytes=0)
    compute = _compute_dtype(plan, parameters[0])
    # Without sharding, the handle's process group has all ranks.
    shards = plan.mesh.shard if plan.mesh.shard > 1 else plan.world_size
    numel = flat_numel(
        (parameter.numel() for parameter in parameters),
        shards,
        aligned=_ALIGNMENT_BYTES // compute.itemsize if plan.use_orig else 0,
    )
    if plan.mesh.shard > 1:
        numel = ceil(numel / plan.mesh.shard) * plan.mesh.shard
    # FSDP1 reduces in the dtype of the computation, unless a dtype is set.
    reduce = torch_dtype(plan.precision.reduce) or compute
    is_trained = any(parameter.requires_grad for parameter in parameters)
    return UnitSizes(gather_bytes=numel * compute.itemsize, reduce_bytes=numel * reduce.itemsize if is_trained else 0)


def _compute_dtype(plan: FsdpPlan, parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype in which a parameter is gathered: quantized ones are not cast."""
    compute = torch_dtype(plan.precision.param)
    if compute is None or not parameter.is_floating_point():
        return master_dtype(plan, parameter)
    return compute
