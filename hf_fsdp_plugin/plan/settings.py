"""Resolves the precision, and checks offload and activation checkpointing against the model and the device."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

import torch
from torch import nn

from hf_fsdp_plugin.plan.model import PlannedDtype, PrecisionPlan
from hf_fsdp_plugin.plan.problem_collector import ProblemCollector
from hf_fsdp_plugin.spec.fsdp_spec import DtypeName, FsdpSpec, Version
from hf_fsdp_plugin.strategies import STRATEGIES


def resolve_precision(spec: FsdpSpec, model: nn.Module, device_type: str, problems: ProblemCollector) -> PrecisionPlan:
    """Return the planned dtypes.

    With mixed precision, trainable parameters are stored in fp32, and cast for each all-gather.
    """
    requested: dict[str, DtypeName] = asdict(spec.precision)
    requested.pop("fp32_modules")
    dtypes: dict[str, PlannedDtype] = {}
    for field, dtype in requested.items():
        dtypes[field] = "unchanged" if dtype == "auto" else dtype
        if dtype == "fp16" and device_type == "cpu":
            problems.add(
                "FSDP-E147",
                f"precision.{field}",
                "fp16 training is not supported on CPU ranks: its gradient scaler requires an accelerator.",
                "Set mixed_precision to bf16 or no.",
            )
    is_mixed = spec.precision.param in ("bf16", "fp16")
    if not is_mixed:
        _check_master_weights(model, problems)
    master: Literal["fp32", "unchanged"] = "fp32" if is_mixed else "unchanged"
    return PrecisionPlan(**dtypes, master=master, fp32_modules=spec.precision.fp32_modules)


def _check_master_weights(model: nn.Module, problems: ProblemCollector) -> None:
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad and p.is_floating_point()}
    if dtypes in ({torch.bfloat16}, {torch.float16}):
        name = str(dtypes.pop()).removeprefix("torch.")
        problems.add(
            "FSDP-W231",
            "precision.param",
            f"the model is {name} and mixed precision is off, so master weights and optimizer state are {name} too. "
            "Small updates are rounded to zero.",
            "Set mixed_precision: bf16 to store master weights in float32, or load the model in float32.",
        )


def check_offload(spec: FsdpSpec, version: Version, device_type: str, problems: ProblemCollector) -> None:
    """Check CPU offload against the FSDP version and the device."""
    if not spec.offload.params:
        return
    strategy = STRATEGIES[spec.sharding.strategy]
    if version == 1 and not strategy.is_sharded and not spec.params.use_orig:
        # Checked in torch's _validate_unshard_params_args. With use_orig_params, state_dict() does not unshard.
        problems.add(
            "FSDP-E232",
            "offload.params",
            f"FSDP1 cannot save parameters with {strategy.name}, CPU offload and fsdp_use_orig_params: false "
            "('offload_to_cpu=True and NO_SHARD is not supported yet').",
            "Set fsdp_version: 2 or fsdp_use_orig_params: true.",
        )
    if device_type == "cpu":
        problems.add("FSDP-N233", "offload.params", "fsdp_offload_params has no effect: the ranks run on the CPU.")


def check_activation(spec: FsdpSpec, model: nn.Module, pre_sharded: bool, problems: ProblemCollector) -> None:
    """Check activation checkpointing against the wrap policy and the model."""
    if spec.activation.checkpointing == "none":
        return
    setting, model_name = "activation.checkpointing", type(model).__name__
    if spec.activation.native:
        # Transformers renamed the method in 5.23.
        if not (hasattr(model, "activation_checkpointing_enable") or hasattr(model, "gradient_checkpointing_enable")):
            problems.add(
                "FSDP-E240",
                setting,
                f"gradient_checkpointing requires a Transformers model, and {model_name} is not one.",
                "Set fsdp_activation_checkpointing: true instead.",
            )
        return
    if spec.wrap.policy == "none" and not pre_sharded:
        problems.add(
            "FSDP-E241",
            setting,
            "fsdp_activation_checkpointing checkpoints the units of the wrap policy, and no wrap policy is set.",
            "Set fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP.",
        )
    # Transformers renamed the property; reading the old name warns.
    new, old = "is_activation_checkpointing", "is_gradient_checkpointing"
    if getattr(model, new if hasattr(model, new) else old, False):
        reason, enabled_by = "already has gradient checkpointing enabled", "the call of gradient_checkpointing_enable()"
    elif any(type(module).__name__ == "CheckpointWrapper" for module in model.modules()):
        reason, enabled_by = "already contains modules wrapped in CheckpointWrapper", "these wrappers"
    else:
        return
    problems.add(
        "FSDP-E242",
        setting,
        f"{model_name} {reason}. With fsdp_activation_checkpointing, each layer would be recomputed twice.",
        f"Remove {enabled_by}, or fsdp_activation_checkpointing.",
    )
