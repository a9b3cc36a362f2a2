"""An Accelerator of stock Accelerate with the settings of a plan."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.integrations.accelerate.private import set_device, set_fsdp
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.strategies import STRATEGIES

CPU_NOTE = (
    "Accelerate runs DDP instead of FSDP on CPU ranks. For this comparison its state is set to FSDP before prepare; "
    "the rest is unchanged."
)


def stock_accelerator(plan: FsdpPlan, device: torch.device) -> Accelerator:
    """Return the Accelerator. The hooks of this package must not be installed.

    The precision is passed as an object, because a config file cannot set the dtype of the reduction. On CPU ranks
    Accelerate would run DDP, see :data:`CPU_NOTE`.
    """
    classes = sorted({name for unit in plan.units if unit.from_policy for name in unit.class_names})
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=plan.version,
        auto_wrap_policy="transformer_based_wrap" if classes else "no_wrap",
        transformer_cls_names_to_wrap=classes or None,
        mixed_precision_policy=_policy(plan),
        cpu_ram_efficient_loading=False,
        **(_fsdp1(plan) if plan.version == 1 else _fsdp2(plan)),
    )
    precision = plan.precision.param if plan.precision.param in ("bf16", "fp16") else None
    accelerator = Accelerator(cpu=device.type == "cpu", fsdp_plugin=plugin, mixed_precision=precision)
    if device.type == "cpu":
        set_fsdp(accelerator.state)
        accelerator.state.fsdp_plugin = plugin
        set_device(accelerator.state, torch.device("cpu"))  # FSDP1 refuses Accelerate's cpu:0
    return accelerator


def _policy(plan: FsdpPlan) -> MixedPrecision | MixedPrecisionPolicy | None:
    param, reduce, output, buffer = (
        torch_dtype(getattr(plan.precision, name)) for name in ("param", "reduce", "output", "buffer")
    )
    if (param, reduce, output, buffer) == (None,) * 4:
        return None
    if plan.version == 1:
        return MixedPrecision(param_dtype=param, reduce_dtype=reduce, buffer_dtype=buffer)
    return MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=output)


def _fsdp1(plan: FsdpPlan) -> dict[str, Any]:
    prefetch = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": "NO_PREFETCH"}[plan.prefetch.backward]
    return {
        "sharding_strategy": STRATEGIES[plan.strategy].torch_name,
        "backward_prefetch": prefetch,
        "forward_prefetch": plan.prefetch.forward,
        "limit_all_gathers": plan.prefetch.limit_all_gathers,
        "use_orig_params": plan.use_orig,
        "cpu_offload": plan.offload_params and plan.device_type != "cpu",
        "sync_module_states": False,
    }


def _fsdp2(plan: FsdpPlan) -> dict[str, Any]:
    return {
        "reshard_after_forward": STRATEGIES[plan.strategy].reshards_after_forward,
        "cpu_offload": plan.offload_params,
    }
