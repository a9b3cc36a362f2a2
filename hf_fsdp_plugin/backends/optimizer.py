"""Optimizers made before sharding, pointed at the parameters that came out of it.

An optimizer that still holds the unsharded parameters trains something that the model no longer uses: the loss does
not move.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FlatParameter

from hf_fsdp_plugin.plan.names import canonical_name, named_parameters
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.torch_private.fsdp1 import names_in


@dataclass(frozen=True, kw_only=True, slots=True)
class DetachedOptimizer:
    """An optimizer without parameters, and the canonical name of each parameter it had, by group."""

    optimizer: torch.optim.Optimizer
    names: tuple[tuple[str, ...], ...]


def detach_optimizers(optimizers: Iterable[torch.optim.Optimizer], model: nn.Module) -> list[DetachedOptimizer]:
    """Take the model's parameters out of its optimizers, remembering them by name.

    Optimizers of another model are left alone. Raises ``SpecError`` for one that mixes this model's parameters with
    others, or that has already stepped: its state is that of whole parameters.
    """
    names: dict[int, str] = {}
    for name, parameter in named_parameters(model):
        names.setdefault(id(parameter), name)
    detached = []
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        known = [id(p) in names for p in parameters]
        if not any(known):
            continue
        if not all(known):
            raise SpecError([_mixed_optimizer(optimizer, len(known) - sum(known))])
        if optimizer.state:
            raise SpecError([_stepped_optimizer(optimizer)])
        groups = tuple(tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups)
        for group in optimizer.param_groups:
            group["params"] = []
        detached.append(DetachedOptimizer(optimizer=optimizer, names=groups))
    return detached


def attach_optimizers(detached: Iterable[DetachedOptimizer], model: nn.Module) -> None:
    """Give each optimizer the sharded parameters of the same names. Raises ``SpecError`` where FSDP1 has merged
    parameters of different groups into one flat parameter.
    """
    found = _sharded_parameters(model)
    for item in detached:
        claimed: dict[int, int] = {}
        for index, (group, names) in enumerate(zip(item.optimizer.param_groups, item.names, strict=True)):
            parameters: dict[int, nn.Parameter] = {}
            for name in names:
                parameter = found[name]
                if claimed.setdefault(id(parameter), index) != index:
                    raise SpecError([_split_flat_parameter(name)])
                parameters[id(parameter)] = parameter
            group["params"] = list(parameters.values())


def _sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Canonical name -> what the optimizer has to update: the parameter itself, or FSDP1's flat parameter that holds
    it.
    """
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, FlatParameter):
            found.update((canonical_name(inner), parameter) for inner in names_in(parameter, name))
        else:
            found[canonical_name(name)] = parameter
    return found


def foreign_parameters(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> int:
    """How many of the optimizer's parameters belong to none of the models."""
    own = {id(p) for model in models for p in model.parameters()}
    return sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])


def _mixed_optimizer(optimizer: Any, num_foreign: int) -> Problem:
    return Problem(
        severity="error",
        message=f"{type(optimizer).__name__} holds {num_foreign} parameters that are not the model's.",
        fix="Make one optimizer per model.",
    )


def _stepped_optimizer(optimizer: Any) -> Problem:
    return Problem(
        severity="error",
        message=f"{type(optimizer).__name__} has already stepped, and its state is that of unsharded parameters.",
        fix="Prepare the model before the first step; load the optimizer's state afterwards.",
    )


def _split_flat_parameter(name: str) -> Problem:
    return Problem(
        severity="error",
        setting="params.use_orig",
        message=f"the optimizer's parameter groups cut through the flat parameter that holds {name}.",
        fix="Write fsdp_use_orig_params: true, or make the optimizer after preparing the model.",
    )
