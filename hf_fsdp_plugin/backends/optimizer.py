"""Replace the parameters of optimizers that were built before sharding.

An optimizer that keeps the unsharded parameters updates tensors that the model no longer uses: the loss does not
change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.plan.names import canonical_name, named_parameters
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.torch_private.fsdp1 import names_in


@dataclass(frozen=True, kw_only=True, slots=True)
class DetachedOptimizer:
    """An optimizer without parameters, and the canonical names of the parameters that each group had.

    Attributes:
        initial: canonical name -> the state that the optimizer has before its first step.
    """

    optimizer: torch.optim.Optimizer
    names: tuple[tuple[str, ...], ...]
    initial: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Filled:
    """An initial state tensor with the shape of its parameter, and one value for all elements."""

    value: float
    dtype: torch.dtype


def detach_optimizers(optimizers: Iterable[torch.optim.Optimizer], model: nn.Module) -> list[DetachedOptimizer]:
    """Remove the model's parameters from its optimizers. Optimizers of other models are left unchanged.

    Raises:
        SpecError: an optimizer also has parameters of other models, or has already stepped, so that its state belongs
            to unsharded parameters.
    """
    names: dict[int, str] = {}
    for name, parameter in named_parameters(model):
        names.setdefault(id(parameter), name)
    detached = []
    for optimizer in optimizers:
        num_foreign = foreign_parameters(optimizer, [model])
        if num_foreign == sum(len(group["params"]) for group in optimizer.param_groups):
            continue
        kind = type(optimizer).__name__
        if num_foreign:
            message = f"{kind} has {num_foreign} parameters that do not belong to the model."
            raise SpecError([Problem(code="FSDP-E304", message=message, fix="Create one optimizer for each model.")])
        initial = _initial_state(optimizer)
        if initial is None:
            message = f"{kind} has stepped before sharding: its state belongs to unsharded parameters."
            fix = "Prepare the model before the first step, and load the optimizer's state afterwards."
            raise SpecError([Problem(code="FSDP-E305", message=message, fix=fix)])
        groups = tuple(tuple(names[id(p)] for p in group["params"]) for group in optimizer.param_groups)
        for group in optimizer.param_groups:
            group["params"] = []
        optimizer.state.clear()
        by_name = {names[id(parameter)]: state for parameter, state in initial.items()}
        detached.append(DetachedOptimizer(optimizer=optimizer, names=groups, initial=by_name))
    return detached


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has state that it had not before its first step."""
    return _initial_state(optimizer) is None


def _initial_state(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, dict[str, Any]] | None:
    """Return the state of an optimizer before its first step; ``None`` if it has stepped.

    Some optimizers create state in the constructor (Adagrad), or empty entries (schedule-free ones in ``train()``).
    """
    initial: dict[torch.Tensor, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        if not isinstance(state, dict):
            return None
        for key, value in state.items():
            is_step = key == "step"
            if is_step and float(value) != 0:
                return None
            if isinstance(value, torch.Tensor) and not is_step:
                filled = _filled(value, parameter.shape, optimizer)
                if filled is None:
                    return None
                value = filled
            initial.setdefault(parameter, {})[key] = value
    return initial


def _filled(value: torch.Tensor, shape: torch.Size, optimizer: torch.optim.Optimizer) -> _Filled | None:
    """Return how to create a state tensor again; ``None`` if its elements differ."""
    if value.shape != shape:
        return None
    local = value.to_local() if isinstance(value, DTensor) else value
    if local.is_meta or not local.numel():  # Adagrad's default, for a rank that has no elements to read
        return _Filled(float(optimizer.defaults.get("initial_accumulator_value", 0.0)), value.dtype)
    first = local.reshape(-1)[0]
    return _Filled(float(first), value.dtype) if bool((local == first).all()) else None


def attach_optimizers(detached: Iterable[DetachedOptimizer], model: nn.Module) -> None:
    """Set each optimizer's parameters to the sharded ones with the same names.

    Raises:
        SpecError: FSDP1 has merged parameters of different groups into one flat parameter.
    """
    found = _sharded_parameters(model)
    for item in detached:
        group_of: dict[int, int] = {}
        for index, (group, names) in enumerate(zip(item.optimizer.param_groups, item.names, strict=True)):
            parameters: dict[int, nn.Parameter] = {}
            for name in names:
                parameter = found[name]
                if group_of.setdefault(id(parameter), index) != index:
                    raise SpecError([_split_flat_parameter(name)])
                parameters[id(parameter)] = parameter
            group["params"] = list(parameters.values())
        for name, state in item.initial.items():
            item.optimizer.state[found[name]] = {key: _create(value, found[name]) for key, value in state.items()}


def _create(value: Any, parameter: nn.Parameter) -> Any:
    """Return an initial state value for a sharded parameter."""
    if isinstance(value, _Filled):
        return torch.full_like(parameter.detach(), value.value, dtype=value.dtype)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return canonical name -> parameter to update: the parameter, or FSDP1's flat parameter that contains it."""
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, FlatParameter):
            found.update((canonical_name(inner), parameter) for inner in names_in(parameter, name))
        else:
            found[canonical_name(name)] = parameter
    return found


def foreign_parameters(optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> int:
    """Return the number of the optimizer's parameters that belong to none of the models."""
    own = {id(p) for model in models for p in model.parameters()}
    return sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])


def _split_flat_parameter(name: str) -> Problem:
    return Problem(
        code="FSDP-E306",
        setting="params.use_orig",
        message=f"the flat parameter that contains {name} has parameters of several parameter groups of the optimizer.",
        fix="Set fsdp_use_orig_params: true, or create the optimizer after preparing the model.",
    )
