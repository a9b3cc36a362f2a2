"""Finds the optimizer of a sharded model and checks that it updates the model's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.observe.units import UnitObservation
from hf_fsdp_plugin.problems import Problem


def unwrapped_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the torch optimizer inside Accelerate's ``AcceleratedOptimizer``."""
    while optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def optimizer_of(model: nn.Module, optimizers: Sequence[Any]) -> Any:
    """Return the first optimizer that updates parameters of this model; ``None`` for a frozen model."""
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            return optimizer
    return None


def trained_pair(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> tuple[nn.Module, Any]:
    """Return the first model that is updated by an optimizer, and this optimizer.

    If no optimizer updates any of the models, return the first model and the first optimizer, so that the report
    contains the problem.
    """
    for model in models:
        if (optimizer := optimizer_of(model, optimizers)) is not None:
            return model, optimizer
    return models[0], optimizers[0] if optimizers else None


def check_optimizer(
    model: nn.Module, units: Sequence[UnitObservation], optimizer: torch.optim.Optimizer | None
) -> list[Problem]:
    """Check that the optimizer has exactly the trainable parameters of the model.

    An optimizer that was created before wrapping updates the old, unsharded parameters, and the loss stays constant.
    """
    if optimizer is None:
        return []
    own = {id(parameter) for parameter in model.parameters()}.union(*(unit.live.parameter_ids for unit in units))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    num_foreign = sum(id(parameter) not in own for parameter in held)
    name = type(optimizer).__name__
    if num_foreign:
        return [
            Problem(
                code="FSDP-E504",
                message=f"{num_foreign} of the {len(held)} parameters of {name} do not belong to the sharded model. "
                "The optimizer was created before wrapping, so it updates parameters that the model does not use.",
                fix="Create the optimizer after preparing the model, or pass both to one prepare() call.",
            )
        ]
    known = {id(parameter) for parameter in held}
    num_left_out = sum(p.requires_grad and id(p) not in known for p in model.parameters())
    if not num_left_out:
        return []
    return [
        Problem(
            code="FSDP-N505",
            message=f"{num_left_out} trainable parameters are in no parameter group of {name}: they are not updated.",
        )
    ]
