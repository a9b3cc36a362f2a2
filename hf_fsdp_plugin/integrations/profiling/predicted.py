"""The planner's predictions for the run that is profiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_fsdp_plugin.estimate.communication import estimate_communication
from hf_fsdp_plugin.estimate.machine_file import calibration_path, read_machine
from hf_fsdp_plugin.estimate.memory import estimate_memory
from hf_fsdp_plugin.estimate.time import estimate_time
from hf_fsdp_plugin.estimate.workload import Optimizer, UpdateLoop, Workload
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import SpecError

_OPTIMIZERS: Final[dict[str, Optimizer]] = {
    "Adam": "adamw",
    "AdamW": "adamw",
    "SGD": "sgd",
    "Adafactor": "adafactor",
    "AdamW8bit": "adamw_8bit",
    "Muon": "muon",
}
_STRATEGIES: Final = ("full_shard", "shard_grad_op")


def predict(
    plan: FsdpPlan,
    model: nn.Module,
    optimizer: Any,
    batch: Sequence[int],
    *,
    forwards_per_step: int,
    reductions_per_step: float,
) -> dict[str, Any]:
    """Return ``predicted``, and the peaks of memory with other settings; or ``not_predicted`` with the reason."""
    config = getattr(unwrapped(model), "config", None)
    if config is None or len(batch) != 2:
        return {"not_predicted": "only Transformers models with token inputs can be predicted"}
    kind = _OPTIMIZERS.get(type(optimizer).__name__)
    if kind is None:
        return {"not_predicted": f"the memory of {type(optimizer).__name__} is unknown"}
    try:
        workload = Workload(
            micro_batch=batch[0],
            seq_len=batch[1],
            accumulation=forwards_per_step,
            sync_each_batch=forwards_per_step > 1 and reductions_per_step > 1.5,
            optimizer=kind,
            update_loop=_update_loop(optimizer, plan.device_type),
            attention=getattr(config, "_attn_implementation", "sdpa"),
        )
        return _predict(plan, _meta_copy(model, config), workload)
    except Exception as error:  # a profile is complete without a prediction
        return {"not_predicted": f"{type(error).__name__}: {error}"[:300]}


def _update_loop(optimizer: Any, device_type: str) -> UpdateLoop:
    """Return how an optimizer runs over the parameters, from its arguments and torch's default on the device."""
    options = getattr(optimizer, "defaults", {})
    if options.get("fused"):
        return "fused"
    foreach = options.get("foreach")
    return "foreach" if foreach or (foreach is None and device_type != "cpu") else "for_loop"


def _predict(plan: FsdpPlan, model: nn.Module, workload: Workload) -> dict[str, Any]:
    memory = estimate_memory(plan, model, workload)
    predicted: dict[str, Any] = {
        "per_rank": memory.to_json(),
        "communication": estimate_communication(plan, model, workload).to_json(),
        "step_seconds": None,
        "machine": None,
    }
    if calibration_path().exists():
        machine = read_machine(calibration_path())
        time = estimate_time(plan, model, workload, machine)
        predicted |= {
            "step_seconds": time.step_seconds, "low_seconds": time.low_seconds, "high_seconds": time.high_seconds,
            "compute_seconds": time.compute_seconds, "communication_seconds": time.communication_seconds,
            "exposed_seconds": time.exposed_seconds, "machine": time.machine,
        }  # fmt: skip
    return {"predicted": predicted, "peaks": _other_peaks(plan, model, workload)}


def _other_peaks(plan: FsdpPlan, model: nn.Module, workload: Workload) -> dict[str, int]:
    """Return the predicted peak with each setting that a suggestion may change, by ``setting=value``."""
    spec = plan.spec
    changed: dict[str, Any] = {
        "sharding.strategy=shard_grad_op": replace(spec, sharding=replace(spec.sharding, strategy="shard_grad_op")),
        "activation.checkpointing=none": replace(spec, activation=replace(spec.activation, checkpointing="none")),
    }
    peaks = {}
    for name, other in changed.items():
        try:
            found = resolve(other, model, world_size=plan.world_size, device_type=plan.device_type)
        except SpecError:
            continue
        peaks[name] = estimate_memory(found, model, workload).peak.bytes
    double = replace(workload, micro_batch=2 * workload.micro_batch, accumulation=max(1, workload.accumulation // 2))
    return peaks | {"micro_batch=2": estimate_memory(plan, model, double).peak.bytes}


def _meta_copy(model: nn.Module, config: Any) -> nn.Module:
    """Return the model without its wrappers and weights."""
    inner = unwrapped(model)
    original: Any = next(cls for cls in type(inner).__mro__ if not issubclass(cls, FSDPModule))
    dtype, before = next(inner.parameters()).dtype, torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype.is_floating_point else before)
    try:
        with torch.device("meta"):
            copy: nn.Module = original(config)
            return copy.train()
    finally:
        torch.set_default_dtype(before)
