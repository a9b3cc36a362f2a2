"""The sharding of a hand-written loop, with torch alone: units and settings of a plan, without the backends."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.strategies import STRATEGIES


def sharded_by_hand(plan: FsdpPlan, model: nn.Module, device: torch.device) -> nn.Module:
    """Shard a model on the CPU and return it. Collective."""
    return _fsdp1(plan, model, device) if plan.version == 1 else _fsdp2(plan, model)


def _fsdp2(plan: FsdpPlan, model: nn.Module) -> nn.Module:
    casts = {name: torch_dtype(getattr(plan.precision, name)) for name in ("param", "reduce", "output")}
    between = MixedPrecisionPolicy(param_dtype=casts["param"], reduce_dtype=casts["reduce"])
    last = MixedPrecisionPolicy(param_dtype=casts["param"], reduce_dtype=casts["reduce"], output_dtype=casts["output"])
    kwargs: dict[str, Any] = {
        "mesh": _mesh(plan),
        "offload_policy": CPUOffloadPolicy(pin_memory=plan.pin_memory) if plan.offload_params else OffloadPolicy(),
    }
    firsts: list[Any] = []
    for unit in plan.units:
        modules = [model.get_submodule(name) for name in unit.modules]
        policy = last if unit.modules == ("",) else between
        reshard = unit.reshard_after_forward
        fully_shard(modules, reshard_after_forward=reshard, mp_policy=policy, **kwargs)
        firsts += [modules[0]] if unit.modules != ("",) else []
    if plan.units[-1].modules != ("",):
        fully_shard(model, mp_policy=last, **kwargs)
    position = {id(module): index for index, module in enumerate(model.modules())}
    firsts.sort(key=lambda module: position[id(module)])
    if plan.prefetch.forward:
        for first, following in pairwise(firsts):
            first.set_modules_to_forward_prefetch([following])
    if plan.prefetch.backward == "none":
        for each in firsts:
            each.set_modules_to_backward_prefetch([each])
    return model


def _fsdp1(plan: FsdpPlan, model: nn.Module, device: torch.device) -> nn.Module:
    strategy, precision = STRATEGIES[plan.strategy], plan.precision
    wrapped = {id(model.get_submodule(name)) for unit in plan.units for name in unit.modules if name}
    casts = precision.param != "unchanged" or precision.buffer != "unchanged"
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in wrapped),
        sharding_strategy=ShardingStrategy[strategy.torch_name],
        device_mesh=_mesh(plan) if strategy.is_sharded else None,
        cpu_offload=CPUOffload(offload_params=plan.offload_params and device.type != "cpu"),
        mixed_precision=MixedPrecision(
            param_dtype=torch_dtype(precision.param),
            reduce_dtype=torch_dtype(precision.reduce),
            buffer_dtype=torch_dtype(precision.buffer),
        )
        if casts
        else None,
        backward_prefetch={
            "pre": BackwardPrefetch.BACKWARD_PRE,
            "post": BackwardPrefetch.BACKWARD_POST,
            "none": None,
        }[plan.prefetch.backward],
        forward_prefetch=plan.prefetch.forward,
        limit_all_gathers=plan.prefetch.limit_all_gathers,
        use_orig_params=plan.use_orig,
        device_id=torch.device("cpu") if device.type == "cpu" else device,
    )


def _mesh(plan: FsdpPlan) -> DeviceMesh:
    strategy = STRATEGIES[plan.strategy]
    if strategy.is_sharded and not strategy.hybrid:
        return init_device_mesh(plan.device_type, (plan.mesh.shard,))
    return init_device_mesh(
        plan.device_type, (plan.mesh.replicate, plan.mesh.shard), mesh_dim_names=("replicate", "shard")
    )
