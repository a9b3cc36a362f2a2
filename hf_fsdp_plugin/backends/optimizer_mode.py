"""Decide how the steps of an optimizer run on a sharded model, and refuse optimizers that cannot run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends import optimizer_probe as probe
from hf_fsdp_plugin.backends.agreement import same_on_all_ranks
from hf_fsdp_plugin.backends.optimizer_kinds import Kind, fsdp2_mode, has_per_shard_state, kind_of
from hf_fsdp_plugin.backends.optimizer_step import StepMode, set_step_mode
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.strategies import STRATEGIES

_USE_ELEMENTWISE = "use an optimizer that updates each element alone (AdamW, SGD, Lion)"


@dataclass(frozen=True, slots=True)
class Decision:
    """How an optimizer's steps run, or the problem: an error, or a warning with which it runs."""

    mode: StepMode = "unchanged"
    problem: Problem | None = None


def apply_step_mode(optimizer: torch.optim.Optimizer, plan: FsdpPlan) -> Problem | None:
    """Decide how the steps of an optimizer of a sharded model run, and set it. Collective.

    Returns:
        The reason why it cannot run, or a warning.
    """
    decision = decide(optimizer, plan)
    code = "" if decision.problem is None else decision.problem.code
    same_on_all_ranks(f"how {type(optimizer).__name__} runs", f"{decision.mode} {code}")
    if decision.problem is None or decision.problem.severity != "error":
        set_step_mode(optimizer, decision.mode)
    return decision.problem


def decide(optimizer: torch.optim.Optimizer, plan: FsdpPlan) -> Decision:
    """Decide how the optimizer runs. Collective for an unknown optimizer under FSDP2."""
    kind = kind_of(optimizer)
    name = _name(optimizer)
    if kind is not None and kind.needs in ("backward", "closure"):
        return Decision(problem=_never(name, kind))
    if plan.backend == "fsdp2":
        return _decide_fsdp2(optimizer, name, kind)
    if plan.use_orig and (plan.mesh.shard == 1 or not STRATEGIES[plan.strategy].is_sharded):
        return Decision()
    return _decide_fsdp1(optimizer, name, kind, plan)


def _name(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the class, with the package because several packages have an ``AdamW``."""
    cls = type(optimizer)
    package = cls.__module__.partition(".")[0]
    return cls.__name__ if package in ("torch", "__main__") else f"{cls.__name__} of {package}"


def _decide_fsdp1(optimizer: torch.optim.Optimizer, name: str, kind: Kind | None, plan: FsdpPlan) -> Decision:
    if kind is not None:
        if kind.needs == "tensors":
            return Decision(problem=_needs_tensors(name, kind.because))
        if has_per_shard_state(optimizer) and not plan.use_orig:
            return Decision(problem=_needs_original_parameters(name))
        return Decision()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not parameters:
        return Decision()
    outcome = probe.probe_flat_shards(optimizer, parameters[0].device)
    if outcome.result == "different":
        because = "computes another update on shards of a test tensor than on the whole tensor"
        return Decision(problem=_needs_tensors(name, because))
    if outcome.result == "fails":
        return Decision(problem=_needs_tensors(name, f"fails on shards of a test tensor ({outcome.error})"))
    return Decision(problem=_untested(name, outcome) if outcome.result == "unknown" else None)


def _decide_fsdp2(optimizer: torch.optim.Optimizer, name: str, kind: Kind | None) -> Decision:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if not sharded:
        return Decision()
    # One kernel for several parameters cannot run on DTensors of different meshes, or on DTensors and tensors.
    is_mixed = len({p.device_mesh if isinstance(p, DTensor) else None for p in parameters}) > 1
    if kind is not None:
        mode = fsdp2_mode(kind, optimizer)
        if mode == "dtensor" and is_mixed and kind.needs == "elements":
            mode = "local"
        return Decision("unchanged" if mode == "dtensor" else mode)
    outcome = probe.probe_dtensors(optimizer, sharded[0])
    if outcome.result == "equal" and not is_mixed:
        return Decision()
    if outcome.result == "unknown":
        return Decision(problem=_untested(name, outcome))
    device = sharded[0].to_local().device
    if probe.probe_flat_shards(optimizer, device).result == "equal":
        return Decision("local")
    if outcome.result == "equal":  # it updates one parameter at a time, or torch names the mix of kinds in its error
        return Decision()
    if probe.probe_single_tensors(optimizer, device).result == "equal":
        return Decision("whole")
    return Decision(problem=_not_on_dtensors(name, outcome))


def _needs_tensors(name: str, because: str) -> Problem:
    return Problem(
        code="FSDP-E320",
        message=f"{name} cannot run on FSDP1's flat shards: it {because}. Training would continue with wrong updates.",
        fix=f"Set fsdp_version: 2, or {_USE_ELEMENTWISE}.",
    )


def _never(name: str, kind: Kind) -> Problem:
    return Problem(
        code="FSDP-E321",
        message=f"{name} cannot run with FSDP: it {kind.because}.",
        fix=f"{_USE_ELEMENTWISE.capitalize()}, or train without FSDP.",
    )


def _needs_original_parameters(name: str) -> Problem:
    return Problem(
        code="FSDP-E322",
        setting="params.use_orig",
        message=f"{name} has state of another shape than its parameters, which cannot be saved for a flat parameter.",
        fix="Set fsdp_use_orig_params: true, or fsdp_version: 2.",
    )


def _not_on_dtensors(name: str, outcome: probe.Outcome) -> Problem:
    found = f"fails ({outcome.error})" if outcome.result == "fails" else "computes another update"
    return Problem(
        code="FSDP-E323",
        message=f"{name} cannot run on FSDP2's sharded parameters: on shards of test tensors it {found}, and it needs "
        "several whole parameters at once.",
        fix=f"{_USE_ELEMENTWISE.capitalize()}.",
    )


def _untested(name: str, outcome: probe.Outcome) -> Problem:
    return Problem(
        code="FSDP-W324",
        message=f"{name} is unknown, and it could not be tested whether its updates are the same on shards "
        f"({outcome.error}).",
        fix="If it uses norms or products of whole parameters, compare the losses with a run on one process, or "
        f"{_USE_ELEMENTWISE}.",
    )
