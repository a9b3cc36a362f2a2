"""FSDP1: the plan carried out with ``torch.distributed.fsdp.FullyShardedDataParallel``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from hf_fsdp_plugin.backends.activations import apply_activation_checkpointing
from hf_fsdp_plugin.backends.mesh import device_mesh
from hf_fsdp_plugin.backends.modules import replace_module
from hf_fsdp_plugin.backends.precision import torch_dtype
from hf_fsdp_plugin.backends.synchronize import BROADCAST_ATTRIBUTE, BroadcastRecord, broadcast_buffers
from hf_fsdp_plugin.backends.units import prepare_ignored, prepare_unit
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.torch_private.functions import tree_map_only

_BACKWARD_PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


def apply_fsdp1(plan: FsdpPlan, model: nn.Module, device: torch.device) -> nn.Module:
    """Wrap ``model`` unit by unit and return the root ``FullyShardedDataParallel``.

    Units are wrapped by hand, not by an ``auto_wrap_policy``: what is wrapped is what the plan lists, and each unit
    gets rank 0's weights just before it is cut. Needs the process group of ``plan.world_size`` ranks.
    """
    record = BroadcastRecord()
    apply_activation_checkpointing(plan, model)
    if plan.sync_module_states or plan.ram_efficient:
        broadcast_buffers(model, device, record)
    ignored = prepare_ignored(plan, model, device, record)
    kwargs = _constructor_arguments(plan, device)
    for unit in plan.units:
        prepare_unit(plan, unit, model, device, record)
        if unit.modules == ("",):
            continue
        for name in unit.modules:
            module = model.get_submodule(name)
            inside = {id(p) for p in module.parameters()}
            replace_module(
                model, module, FSDP(module, ignored_states=[p for p in ignored if id(p) in inside], **kwargs)
            )
    root = FSDP(model, ignored_states=ignored, **kwargs)
    _cast_output(plan, root)
    _gather_root_for_generate(root)
    setattr(root, BROADCAST_ATTRIBUTE, record)
    return root


def _constructor_arguments(plan: FsdpPlan, device: torch.device) -> dict[str, Any]:
    """One unit's arguments; ``device_id`` has no index on CPU, FSDP1 takes ``cpu`` and ``cpu:0`` for different
    devices.
    """
    strategy = STRATEGIES[plan.strategy]
    return {
        "sharding_strategy": ShardingStrategy[strategy.torch_name],
        "device_mesh": device_mesh(plan) if strategy.is_sharded else None,
        # On CPU ranks the shards are in host memory as they are, and FSDP1 would try to pin it.
        "cpu_offload": CPUOffload(offload_params=plan.offload_params and device.type != "cpu"),
        "mixed_precision": _mixed_precision(plan),
        "backward_prefetch": _BACKWARD_PREFETCH[plan.prefetch.backward],
        "forward_prefetch": plan.prefetch.forward,
        "limit_all_gathers": plan.prefetch.limit_all_gathers,
        "use_orig_params": plan.use_orig,
        "device_id": torch.device("cpu") if device.type == "cpu" else device,
    }


def _mixed_precision(plan: FsdpPlan) -> MixedPrecision | None:
    """``None`` where nothing would be cast: FSDP1 then keeps no second, low-precision copy of its shards."""
    precision = plan.precision
    if precision.param == "unchanged" and precision.buffer == "unchanged" and precision.reduce in ("fp32", "unchanged"):
        return MixedPrecision(reduce_dtype=torch_dtype(precision.reduce)) if _holds_low_precision(plan) else None
    return MixedPrecision(
        param_dtype=torch_dtype(precision.param),
        reduce_dtype=torch_dtype(precision.reduce),
        buffer_dtype=torch_dtype(precision.buffer),
    )


def _holds_low_precision(plan: FsdpPlan) -> bool:
    return any(dtype != "float32" for unit in plan.units for dtype in unit.dtypes)


def _cast_output(plan: FsdpPlan, root: FSDP) -> None:
    """FSDP1 has no output dtype; a hook on the root does what FSDP2's policy does."""
    dtype = torch_dtype(plan.precision.output)
    if dtype is None:
        return

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def after_forward(module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map_only(torch.Tensor, cast, output)

    root.register_forward_hook(after_forward)


def _gather_root_for_generate(root: FSDP) -> None:
    """``generate`` calls the inner model and so passes by the root's hooks, whose embedding and head would stay flat
    shards.

    They are gathered for the time of the call, and all ranks run as many steps as the longest needs, or they would
    wait for each other's all-gathers for ever.
    """
    inner = root.module
    generate = getattr(inner, "generate", None)
    if generate is None:
        return

    @functools.wraps(generate)
    def gathered_generate(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("synced_gpus", True)
        with FSDP.summon_full_params(root, recurse=False, writeback=False):
            return generate(*args, **kwargs)

    root.generate = gathered_generate  # type: ignore[assignment]
