"""FSDP1: applies a plan with ``torch.distributed.fsdp.FullyShardedDataParallel``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from hf_fsdp_plugin.backends.device_meshes import device_mesh
from hf_fsdp_plugin.backends.loading.weight_loader import Places, WeightLoader
from hf_fsdp_plugin.backends.sharding.forwards import cast_inputs_of
from hf_fsdp_plugin.backends.torch_types import cast_floats
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, UnitPlan, torch_dtype
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.torch_private import fsdp1 as private
from hf_fsdp_plugin.torch_private.modules import replace_module

_ONE_DTYPE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules whose inputs must have the dtype of their weights."""
_BACKWARD_PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


def apply_fsdp1(plan: FsdpPlan, model: nn.Module, device: torch.device, loader: WeightLoader) -> nn.Module:
    """Wrap ``model`` unit by unit and return the root ``FullyShardedDataParallel``.

    Units are wrapped one by one instead of by an ``auto_wrap_policy``, so that exactly the planned units are wrapped
    and each receives rank 0's weights just before it is sharded. Needs a process group of ``plan.world_size`` ranks.
    """
    ignored = loader.prepare_ignored()
    kwargs = _constructor_arguments(plan, device)
    compute_dtype = torch_dtype(plan.precision.param)
    in_root: Places = {}
    for unit in plan.units:
        whole = loader.prepare_unit(unit)
        if unit.modules == ("",):
            in_root = whole
            continue
        # The other units receive activations, which have the compute dtype already.
        input_dtype = compute_dtype if _may_receive_other_dtypes(plan, unit, model) else None
        for name in unit.modules:
            module = model.get_submodule(name)
            inside = {id(parameter) for parameter in module.parameters()}
            ignored_inside = [parameter for parameter in ignored if id(parameter) in inside]
            wrapped = FSDP(module, ignored_states=ignored_inside, **kwargs)
            _fill(wrapped, whole, loader)
            cast_inputs_of(wrapped, input_dtype)
            replace_module(model, module, wrapped)
    root = FSDP(model, ignored_states=ignored, **kwargs)
    _fill(root, in_root, loader)
    cast_inputs_of(root, compute_dtype)
    output_dtype = torch_dtype(plan.precision.output)
    if output_dtype is not None:  # FSDP1 has no argument like FSDP2's ``output_dtype``
        root.register_forward_hook(lambda module, args, output: cast_floats(output, output_dtype))
    private.allow_gradients_of_compute_dtype(root)
    private.reduce_after_any_forward(root)
    return root


def _fill(unit: FSDP, whole: Places, loader: WeightLoader) -> None:
    flat = private.flat_parameter(unit)
    for member in private.original_parameters(flat) if flat is not None else ():
        if (values := whole.get((member.module, member.attribute))) is not None:
            shard = private.local_shard(flat).narrow(0, member.offset, member.stop - member.start)
            loader.copy_part(shard, values.view(-1)[member.start : member.stop])


def _may_receive_other_dtypes(plan: FsdpPlan, unit: UnitPlan, model: nn.Module) -> bool:
    """Return whether code outside the unit may cast its inputs to the dtype of the shards, which it reads off a weight.

    This concerns modules that are no repeated layers, such as the embeddings of ViT, and those that cannot compute with
    inputs of another dtype.
    """
    if unit.is_split_off or [other.class_names for other in plan.units].count(unit.class_names) == 1:
        return True
    return all(isinstance(unwrapped(model.get_submodule(name)), _ONE_DTYPE) for name in unit.modules)


def _constructor_arguments(plan: FsdpPlan, device: torch.device) -> dict[str, Any]:
    """Return the constructor arguments that all units share."""
    on_cpu = device.type == "cpu"
    strategy = STRATEGIES[plan.strategy]
    return {
        "sharding_strategy": ShardingStrategy[strategy.torch_name],
        "device_mesh": device_mesh(plan) if strategy.is_sharded else None,
        # On the CPU, shards are in CPU memory anyway; with offload, FSDP1 would try to pin them.
        "cpu_offload": CPUOffload(offload_params=plan.offload_params and not on_cpu),
        "mixed_precision": _mixed_precision(plan),
        "backward_prefetch": _BACKWARD_PREFETCH[plan.prefetch.backward],
        "forward_prefetch": plan.prefetch.forward,
        "limit_all_gathers": plan.prefetch.limit_all_gathers,
        "use_orig_params": plan.use_orig,
        # Without an index: FSDP1 treats cpu and cpu:0 as different devices.
        "device_id": torch.device("cpu") if on_cpu else device,
    }


def _mixed_precision(plan: FsdpPlan) -> MixedPrecision | None:
    """Return the policy, or ``None`` if nothing is cast: FSDP1 then keeps no low-precision copy of its shards.

    Inputs are cast by :mod:`hf_fsdp_plugin.backends.sharding.forwards`.
    """
    precision = plan.precision
    casts = (precision.param, precision.buffer) != ("unchanged", "unchanged")
    reduces_fp32 = precision.reduce in ("fp32", "unchanged")
    if not casts and reduces_fp32 and all(dtype == "float32" for unit in plan.units for dtype in unit.dtypes):
        return None
    return MixedPrecision(
        param_dtype=torch_dtype(precision.param),
        reduce_dtype=torch_dtype(precision.reduce),
        buffer_dtype=torch_dtype(precision.buffer),
        cast_root_forward_inputs=False,
    )
