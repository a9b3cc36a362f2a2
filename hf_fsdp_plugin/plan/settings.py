"""The settings that need no look at the units: precision, devices, activation checkpointing, and what FSDP2 lacks."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from hf_fsdp_plugin.plan.complaints import Complaints
from hf_fsdp_plugin.plan.model import PlannedDtype, PrecisionPlan
from hf_fsdp_plugin.spec.model import DtypeName, FsdpSpec, Version
from hf_fsdp_plugin.spec.rules import fsdp2_has_no_such_switch
from hf_fsdp_plugin.strategies import STRATEGIES

_LOW: tuple[DtypeName, ...] = ("bf16", "fp16")


def resolve_precision(spec: FsdpSpec, model: nn.Module, device_type: str, complaints: Complaints) -> PrecisionPlan:
    """Every dtype decided. Under mixed precision trainable parameters are kept in fp32, and cast for each gather."""
    asked = spec.precision
    if device_type == "cpu":
        for field in ("param", "reduce", "output", "buffer"):
            if getattr(asked, field) == "fp16":
                complaints.error(
                    f"precision.{field}",
                    "fp16 is for accelerators: on CPU there is no gradient scaler for it.",
                    "Set mixed_precision: bf16, which CPUs have, or no.",
                )
    param = _planned(asked.param)
    if param in ("unchanged", "fp32"):
        _warn_of_low_masters(spec, model, complaints)
    return PrecisionPlan(
        param=param,
        reduce=_planned(asked.reduce),
        output=_planned(asked.output),
        buffer=_planned(asked.buffer),
        master="fp32" if asked.param in _LOW else "unchanged",
    )


def _planned(dtype: DtypeName) -> PlannedDtype:
    return "unchanged" if dtype == "auto" else dtype


def _warn_of_low_masters(spec: FsdpSpec, model: nn.Module, complaints: Complaints) -> None:
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    low = [dtype for dtype in (torch.bfloat16, torch.float16) if sizes[dtype] and len(sizes) == 1]
    if low:
        name = str(low[0]).removeprefix("torch.")
        complaints.warning(
            "precision.param",
            f"the model is {name} and no mixed precision was asked for, so that master weights and optimizer state are "
            f"{name} too; small updates are rounded away.",
            "Set mixed_precision: bf16 to keep master weights in float32, or load the model in float32.",
        )


def judge_devices(spec: FsdpSpec, version: Version, device_type: str, complaints: Complaints) -> None:
    """CPU offload against the backend and the device."""
    if not spec.offload.params:
        return
    if version == 1 and not STRATEGIES[spec.sharding.strategy].is_sharded and not spec.params.use_orig:
        # torch's _validate_unshard_params_args; with original parameters state_dict() needs no unsharding.
        complaints.error(
            "offload.params",
            "FSDP1 cannot save flat parameters that are offloaded and not sharded ('offload_to_cpu=True and NO_SHARD "
            "is not supported yet').",
            "Set fsdp_version: 2, where no_shard and offload go together, or fsdp_use_orig_params: true.",
        )
    if device_type == "cpu":
        complaints.note("offload.params", "the ranks compute on CPU, where parameters are already: nothing moves.")


def judge_mapping(spec: FsdpSpec, version: Version, complaints: Complaints) -> None:
    """FSDP1's settings that FSDP2 has no counterpart for; said here only where the spec has not said it already."""
    if version == 1:
        return
    for problem in fsdp2_has_no_such_switch(spec):
        if problem not in spec.problems:
            complaints.warning(problem.setting, problem.message, problem.fix)


def judge_activation(spec: FsdpSpec, model: nn.Module, pre_sharded: bool, complaints: Complaints) -> None:
    """Activation checkpointing against the wrap policy and against what the model does already."""
    asked = spec.activation
    if asked.checkpointing == "none":
        return
    setting = "activation.checkpointing"
    if asked.native:
        if not hasattr(model, "gradient_checkpointing_enable"):
            complaints.error(
                setting,
                f"gradient_checkpointing is Transformers' own, and {type(model).__name__} has none.",
                "Set fsdp_activation_checkpointing instead.",
            )
        return
    if spec.wrap.policy == "none" and not pre_sharded:
        complaints.error(
            setting,
            "activations are checkpointed unit by unit, and without a wrap policy there is no unit to checkpoint.",
            "Set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP.",
        )
    if getattr(model, "is_gradient_checkpointing", False):
        complaints.error(
            setting,
            f"{type(model).__name__} has Transformers' gradient checkpointing enabled already; with FSDP's too, every "
            "layer would be computed and gathered twice over.",
            "Drop gradient_checkpointing_enable(), or fsdp_activation_checkpointing.",
        )
    elif any(type(module).__name__ == "CheckpointWrapper" for module in model.modules()):
        complaints.error(
            setting,
            f"parts of {type(model).__name__} are wrapped for checkpointing already.",
            "Drop that wrapping, or fsdp_activation_checkpointing.",
        )
