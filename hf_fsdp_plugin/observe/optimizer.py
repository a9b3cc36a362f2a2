"""Finds the optimizer of a sharded model and checks that it updates the model's parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.backends.replicated import is_replicated
from hf_fsdp_plugin.backends.shard import sharded_models
from hf_fsdp_plugin.observe.units import UnitObservation
from hf_fsdp_plugin.problems import Problem


def unwrapped_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the torch optimizer inside Accelerate's ``AcceleratedOptimizer``."""
    while optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def optimizers_of(model: nn.Module, optimizers: Sequence[Any]) -> list[Any]:
    """Return the optimizers that update parameters of this model."""
    own = {id(parameter) for parameter in model.parameters()}
    return [
        optimizer
        for optimizer in optimizers
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])
    ]


def trained_pair(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> tuple[nn.Module, Sequence[Any]]:
    """Return the first model that is updated by optimizers, and these optimizers.

    If no optimizer updates any of the models, return the first model and all optimizers, so that the report contains
    the problem.
    """
    for model in models:
        if own := optimizers_of(model, optimizers):
            return model, own
    return models[0], optimizers


def check_optimizers(
    model: nn.Module,
    units: Sequence[UnitObservation],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    prepared_ids: Collection[int] = (),
) -> list[Problem]:
    """Check that the optimizers together have exactly the trainable parameters of the model.

    Args:
        prepared_ids: ``id`` of the parameters that the optimizers had when they were prepared.
    """
    if not optimizers:
        return []
    copies = frozenset[int]().union(*(unit.live.known("copy_ids", frozenset()) for unit in units))
    own = {id(parameter) for parameter in model.parameters()}.union(*(unit.live.parameter_ids for unit in units))
    held = {id(parameter) for optimizer in optimizers for parameter in parameters_in(optimizer)}
    problems = [
        problem
        for optimizer in optimizers
        for problem in (_foreign(optimizer, own), _copied(optimizer, copies))
        if problem is not None
    ]
    # A model whose parameters are gathered now, for example after an evaluation, has the shards all the same.
    trained = {id(p) for p in model.parameters() if p.requires_grad and id(p) not in copies}
    left_out = trained - held
    names = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    if problems or not left_out:
        return problems
    if num_removed := len(left_out.intersection(prepared_ids)):
        return [
            Problem(
                code="FSDP-E509",
                message=f"{num_removed} of {len(trained)} trainable parameters are no longer in {names}, which had "
                "them when it was prepared: they are not updated.",
                fix="Do not change the parameter groups after prepare(). If the parameters are meant to stay constant, "
                "set requires_grad = False before prepare().",
            )
        ]
    return [
        Problem(
            code="FSDP-W505",
            message=f"{len(left_out)} of {len(trained)} trainable parameters are in no parameter group of {names}: "
            "they are not updated.",
            fix="Pass all trainable parameters to the optimizer, or set requires_grad = False on the others.",
        )
    ]


def _foreign(optimizer: torch.optim.Optimizer, own: Collection[int]) -> Problem | None:
    """Return a problem for parameters of no live model.

    An optimizer that was created before wrapping updates the old, unsharded parameters, and the loss stays constant.
    """
    held = parameters_in(optimizer)
    foreign = [parameter for parameter in held if id(parameter) not in own and not is_replicated(parameter)]
    others = {id(parameter) for model in sharded_models() for parameter in model.parameters()} if foreign else ()
    num_foreign = sum(id(parameter) not in others for parameter in foreign)
    if not num_foreign:
        return None
    return Problem(
        code="FSDP-E504",
        message=f"{num_foreign} of the {len(held)} parameters of {type(optimizer).__name__} do not belong to the "
        "sharded model. The optimizer was created before wrapping, so it updates parameters that the model does not "
        "use.",
        fix="Create the optimizer after preparing the model, or pass both to one prepare() call.",
    )


def _copied(optimizer: torch.optim.Optimizer, copies: Collection[int]) -> Problem | None:
    held = parameters_in(optimizer)
    num_copies = sum(id(parameter) in copies for parameter in held)
    if not num_copies:
        return None
    return Problem(
        code="FSDP-E504",
        message=f"{num_copies} of the {len(held)} parameters of {type(optimizer).__name__} are gathered copies, which "
        "FSDP frees. Updates of them are lost.",
        fix="Create the optimizer before the first forward, or pass model and optimizer to one prepare() call.",
    )


def parameters_in(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
