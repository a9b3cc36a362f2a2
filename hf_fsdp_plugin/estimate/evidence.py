"""Which measurements support the interval of a predicted time."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from hf_fsdp_plugin.estimate.machines import Machine
from hf_fsdp_plugin.plan.model import FsdpPlan


class Interval(NamedTuple):
    """Factors of the time of a step, ``None`` if no measurements support them, and what does or what is missing."""

    low: float | None
    high: float | None
    words: str


def interval_of(machine: Machine, plan: FsdpPlan, model: nn.Module, dtype: str) -> Interval:
    """Return the interval that held for published runs of the same kind, or for the measurements of this machine."""
    if machine.curves:
        slow, fast = machine.spread
        return Interval(1 / fast, 1 / slow, "the spread of the measurements on this machine")
    missing = _missing(machine, plan, model, dtype)
    if missing or machine.evidence is None:
        return Interval(None, None, f"no interval: {missing}")
    runs = machine.evidence
    words = (
        f"{runs.inside} of {runs.runs} published runs on {runs.devices} lie inside, each by a fit without its source"
    )
    return Interval(runs.low, runs.high, words)


def _missing(machine: Machine, plan: FsdpPlan, model: nn.Module, dtype: str) -> str:
    """Return why the published runs do not support an interval; empty if they do."""
    if machine.evidence is None:
        return f"no published run on {machine.device} was compared"
    if dtype != "bf16":
        return f"the published runs compute in bf16, not in {dtype}"
    if plan.offload_params:
        return "no published run with offloaded parameters was compared"
    if any(not parameter.requires_grad for parameter in model.parameters()):
        return "too few published runs with frozen parameters were compared"
    if any(type(module).__name__.endswith("Experts") for module in model.modules()):
        return "too few published runs of mixtures of experts were compared"
    if not type(model).__name__.endswith(("CausalLM", "LMHeadModel")):
        return f"the published runs train decoders for language, not {type(model).__name__}"
    return ""
