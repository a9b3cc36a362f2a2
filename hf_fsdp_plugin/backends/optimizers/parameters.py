"""The parameters of optimizers: replaced by the sharded ones if the optimizers were built before sharding.

An optimizer that keeps the unsharded parameters updates tensors that the model no longer uses: the loss does not
change.

Steps of some optimizers run on plain tensors instead of FSDP2's DTensors:

``local``: on this rank's shards. Their memory is shared with the parameters.
``whole``: on gathered parameters, one at a time. All ranks compute the same update, and each keeps its shard of it. The
state is whole on every rank; for the factored or projected state of these optimizers, this is less than their shards of
AdamW's state would be on a few ranks.
``divided``: on whole matrices, each on one rank: see :mod:`hf_fsdp_plugin.backends.optimizers.divided_steps`.

Between steps the optimizer has the parameters of the model, so that clipping, schedulers, the gradient scaler and
checkpoints need no special cases. The parameters are replaced by torch's step hooks, which also run if a scheduler or
Accelerate has wrapped ``step``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hf_fsdp_plugin.backends.torch_types import shard_like
from hf_fsdp_plugin.plan.names import canonical_name, named_parameters
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.state import parts_of, process
from hf_fsdp_plugin.torch_private.fsdp1 import flat_units, names_in, original_parameters
from hf_fsdp_plugin.torch_private.modules import local_tensor

StepMode = Literal["unchanged", "local", "whole", "divided"]


@dataclass
class _Adaptation:
    """How an optimizer is adapted to shards.

    Attributes:
        is_attached: whether it was created with parameters of the original shapes.
        step_mode: how its steps run.
        is_offloaded: whether its state is kept in host memory.
    """

    is_attached: bool = False
    step_mode: StepMode = "unchanged"
    is_offloaded: bool = False


def _adaptation(optimizer: Optimizer) -> _Adaptation:
    return parts_of(optimizer).get(_Adaptation)


@dataclass(frozen=True, kw_only=True, slots=True)
class DetachedOptimizer:
    """An optimizer without the parameters of one model, and the former parameters of each of its groups.

    Attributes:
        groups: the canonical names of the model's parameters, and the parameters of other models, in the order of the
            group.
    """

    optimizer: Optimizer
    groups: tuple[tuple[str | nn.Parameter, ...], ...]


def detach_optimizers(optimizers: Iterable[Optimizer], model: nn.Module) -> list[DetachedOptimizer]:
    """Remove the model's parameters from its optimizers. Parameters of other models are left unchanged.

    Raises:
        SpecError: an optimizer has already stepped, so that its state belongs to unsharded parameters.
    """
    names: dict[int, str] = {}
    for name, parameter in named_parameters(model):
        names.setdefault(id(parameter), name)
    detached = []
    for optimizer in optimizers:
        if not has_parameters_of(model, optimizer):
            continue
        if has_stepped(optimizer):
            name = type(optimizer).__name__
            message = f"{name} has stepped before sharding: its state belongs to unsharded parameters."
            fix = "Prepare the model before the first step, and load the optimizer's state afterwards."
            raise SpecError([Problem(code="FSDP-E305", message=message, fix=fix)])
        groups = tuple(tuple(names.get(id(p), p) for p in group["params"]) for group in optimizer.param_groups)
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in names]
        for own in [parameter for parameter in optimizer.state if id(parameter) in names]:
            del optimizer.state[own]
        detached.append(DetachedOptimizer(optimizer=optimizer, groups=groups))
    return detached


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether the optimizer has state that it had not before its first step.

    Adagrad creates its state in the constructor, and schedule-free optimizers create empty entries in ``train()``.
    """
    states = [state for state in optimizer.state.values() if state]
    if isinstance(optimizer, torch.optim.Adagrad):
        return any(float(state["step"]) for state in states)
    return bool(states)


def attach_optimizers(detached: Iterable[DetachedOptimizer], model: nn.Module) -> None:
    """Set each optimizer's parameters to the sharded ones with the same names.

    Raises:
        SpecError: FSDP1 has merged parameters of different groups into one flat parameter.
    """
    found = _sharded_parameters(model)
    for item in detached:
        group_of: dict[int, int] = {}
        for index, (group, members) in enumerate(zip(item.optimizer.param_groups, item.groups, strict=True)):
            parameters: dict[int, nn.Parameter] = {}
            for member in members:
                parameter = found[member] if isinstance(member, str) else member
                if isinstance(member, str) and group_of.setdefault(id(parameter), index) != index:
                    message = f"the flat parameter that contains {member} has parameters of several parameter groups "
                    message += "of the optimizer."
                    fix = "Set fsdp_use_orig_params: true, or create the optimizer after preparing the model."
                    raise SpecError([Problem(code="FSDP-E306", setting="params.use_orig", message=message, fix=fix)])
                parameters[id(parameter)] = parameter
            group["params"] = list(parameters.values())
        if isinstance(item.optimizer, torch.optim.Adagrad):
            _create_state_of_adagrad(item.optimizer)
        _adaptation(item.optimizer).is_attached = True


def check_groups(optimizer: Optimizer, model: nn.Module) -> Problem | None:
    """Return a warning if FSDP1's pieces, which all have one dimension, may have decided the groups of an optimizer.

    This is so if it was created after sharding, one of its groups is empty, and another one has matrices. Groups that
    separate matrices from vectors were made by names.
    """
    if _adaptation(optimizer).is_attached or all(group["params"] for group in optimizer.param_groups):
        return None
    members = [member for _, flat in flat_units(model) for member in original_parameters(flat)]
    matrices = {id(member.parameter): member.name for member in members if len(member.shape) > 1}
    found = next((name for p in parameters_in(optimizer) if (name := matrices.get(id(p)))), None)
    kinds = [{id(parameter) in matrices for parameter in group["params"]} for group in optimizer.param_groups]
    if found is None or ({True, False} not in kinds and {False} in kinds):
        return None
    message = f"{type(optimizer).__name__} was created after prepare() and has an empty parameter group. Under FSDP1, "
    message += f"`ndim` and `dim()` of all parameters are 1 then, also of matrices such as {canonical_name(found)}, so "
    message += "groups by the number of dimensions are wrong."
    fix = "Create the optimizer before prepare(), and pass it to the same call as the model, or set fsdp_version: 2. "
    return Problem(code="FSDP-W328", message=message, fix=f"{fix}Groups by names are right: ignore this for them.")


def _create_state_of_adagrad(optimizer: torch.optim.Adagrad) -> None:
    """Create the state of new parameters, as the constructor does."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                total = torch.full_like(parameter.detach(), group["initial_accumulator_value"])
                optimizer.state[parameter] = {"step": torch.tensor(0.0), "sum": total}


def _sharded_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return canonical name -> parameter to update: the parameter, or FSDP1's flat parameter that contains it."""
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, FlatParameter):
            found.update((canonical_name(inner), parameter) for inner in names_in(parameter, name))
        else:
            found[canonical_name(name)] = parameter
    return found


def foreign_parameters(optimizer: Optimizer, models: Sequence[nn.Module]) -> int:
    """Return the number of the optimizer's parameters that are in none of the models."""
    own = {id(p) for model in models for p in model.parameters()}
    return sum(id(p) not in own for p in parameters_in(optimizer))


def parameters_in(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def has_parameters_of(model: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether an optimizer has parameters of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for parameter in parameters_in(optimizer))


class JointModels(nn.ModuleDict):
    """Several models whose parameters one optimizer has, named ``model_0`` and so on.

    The names in the optimizer's state begin with the names of the models.
    """


def owner_of(optimizer: Optimizer, models: Sequence[nn.Module]) -> nn.Module | None:
    """Return the model whose parameters an optimizer has: :class:`JointModels` for several, ``None`` for none."""
    owners = {f"model_{i}": model for i, model in enumerate(models) if has_parameters_of(model, optimizer)}
    return JointModels(owners) if len(owners) > 1 else next(iter(owners.values()), None)


def average_gradient(parameter: torch.Tensor) -> None:
    """Average an accumulated gradient over all ranks, for a parameter whose gradients FSDP does not reduce.

    It runs after every backward. This is correct under gradient accumulation too, because gradients that are averaged
    already are equal on all ranks.
    """
    if parameter.grad is not None:
        dist.all_reduce(parameter.grad)
        parameter.grad.div_(dist.get_world_size())


def step_mode(optimizer: Optimizer) -> StepMode:
    """Return how the optimizer's steps run."""
    return _adaptation(optimizer).step_mode


class StepHooks(Protocol):
    """What is called before and after each step of an optimizer."""

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any: ...

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None: ...


def set_step_mode(
    optimizer: Optimizer,
    mode: StepMode,
    divided: Callable[[], StepHooks],
    offloaded: Callable[[StepHooks | None], StepHooks] | None = None,
) -> None:
    """Set how the optimizer's steps run, once.

    Args:
        divided: returns the hooks of the mode ``divided``.
        offloaded: returns the hooks of steps whose state is in host memory, around those of the mode.
    """
    adaptation = _adaptation(optimizer)
    if (mode == "unchanged" or adaptation.step_mode == mode) and (offloaded is None or adaptation.is_offloaded):
        return
    adaptation.step_mode, adaptation.is_offloaded = mode, offloaded is not None
    steps: StepHooks | None = None
    if mode != "unchanged":
        steps = divided() if mode == "divided" else _PlainSteps(whole=mode == "whole")
    if offloaded is not None:
        steps = offloaded(steps)
    assert steps is not None
    optimizer.register_step_pre_hook(steps.before)
    optimizer.register_step_post_hook(steps.after)


StepCallback = Callable[[Optimizer, Any, Any], None]


class _StepCallbacks(dict[object, StepCallback]):
    """What is called before or after each step of every optimizer, by a key of its own.

    Args:
        register: torch's function that adds a hook to all optimizers.
    """

    def __init__(self, register: Callable[[Any], object]) -> None:
        super().__init__()
        register(self._call)

    def _call(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for callback in list(self.values()):
            callback(optimizer, args, kwargs)


_before_steps = process.owns(partial(_StepCallbacks, register_optimizer_step_pre_hook), kept=True)
_after_steps = process.owns(partial(_StepCallbacks, register_optimizer_step_post_hook), kept=True)


def before_each_step(callback: StepCallback) -> Callable[[], None]:
    """Call a function before each step of every optimizer, until the returned function is called, at any time."""
    return _add_callback(_before_steps(), callback)


def after_each_step(callback: StepCallback) -> Callable[[], None]:
    """Call a function after each step of every optimizer, until the returned function is called, at any time."""
    return _add_callback(_after_steps(), callback)


def _add_callback(callbacks: _StepCallbacks, callback: StepCallback) -> Callable[[], None]:
    """Add a function, and return the function that removes it.

    A handle of torch must not be removed in a step, because torch iterates over the hooks themselves: neither by a
    hook, nor by the finalizer of an object that Python collects meanwhile.
    """
    key = object()
    callbacks[key] = callback

    def end() -> None:
        callbacks.pop(key, None)

    return end


class _PlainSteps:
    """Hooks around an optimizer's step that put plain parameters in place of its ``DTensor``s, and put these back."""

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._swapped: list[tuple[DTensor, nn.Parameter]] = []
        self._groups: list[list[torch.Tensor]] = []

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Replace the parameters. In ``whole`` mode, all but the last one are updated here."""
        self._restore(optimizer)  # the last step may have raised an error, without its hook at the end
        changed = _with_evaluated_closure(args, kwargs)
        # Optimizers of bitsandbytes find the parameters with settings of their own before these are replaced.
        if not getattr(optimizer, "initialized", True) and hasattr(optimizer, "check_overrides"):
            optimizer.check_overrides()
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        places = [
            (group, index, parameter)
            for group, parameters in zip(optimizer.param_groups, self._groups, strict=True)
            for index, parameter in enumerate(parameters)
            if isinstance(parameter, DTensor) and (parameter.grad is not None or not self._whole)
        ]
        if not self._whole:
            for group, index, parameter in places:
                group["params"][index] = self._swap(optimizer, parameter)
            return changed
        if places:
            self._step_plain_parameters(optimizer)
        for number, (own_group, _, parameter) in enumerate(places):
            self._restore(optimizer)
            for group in optimizer.param_groups:
                group["params"] = []
            own_group["params"] = [self._swap(optimizer, parameter)]
            if number < len(places) - 1:
                step_without_hooks(optimizer)
        return changed

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._restore(optimizer)
        self._groups = []  # the groups of the next call may be others

    def _step_plain_parameters(self, optimizer: Optimizer) -> None:
        """Update the parameters that FSDP2 does not shard, such as scalars, as usual."""
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = [p for p in parameters if not isinstance(p, DTensor)]
        if any(parameter.grad is not None for parameter in parameters_in(optimizer)):
            step_without_hooks(optimizer)

    def _swap(self, optimizer: Optimizer, parameter: DTensor) -> nn.Parameter:
        """Return the plain tensor that the optimizer has in place of a parameter during a step. Moves its state."""
        plain = nn.Parameter(_plain(parameter, self._whole), requires_grad=parameter.requires_grad)
        if parameter.grad is not None and plain.numel():  # an empty shard gets no gradient
            plain.grad = _plain(parameter.grad, self._whole)
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            optimizer.state[plain] = {key: _plain(value, self._whole) for key, value in state.items()}
        self._swapped.append((parameter, plain))
        return plain

    @torch.no_grad()
    def _restore(self, optimizer: Optimizer) -> None:
        """Write the updates to the shards, and give the optimizer its parameters and their state."""
        for parameter, plain in self._swapped:
            local, updated = local_tensor(parameter), plain.detach()
            if self._whole:
                updated = shard_like(parameter, updated).to_local()
            if updated.numel() and updated.data_ptr() != local.data_ptr():  # it has not updated the shard's memory
                local.copy_(updated)
            if plain in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(plain)
        self._swapped = []
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=False):
            group["params"] = list(parameters)


def step_without_hooks(optimizer: Optimizer) -> None:
    """Update the parameters that the groups have now."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):  # set by torch on the function that calls the hooks
        step = step.__wrapped__
    step(optimizer)


@torch.no_grad()
def _plain(value: Any, whole: bool) -> Any:
    """Return a parameter, a gradient or a loaded state value as a plain tensor. Collective for whole tensors."""
    return value.full_tensor() if whole and isinstance(value, DTensor) else local_tensor(value)


def _with_evaluated_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Evaluate the closure of a step before the gradients are read. Return the new arguments; ``None`` without one."""
    # torch passes the optimizer itself as the first of ``args``.
    optimizer, *others = args
    closure = others[0] if others else kwargs.get("closure")
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()
    if others:
        return (optimizer, lambda: loss, *others[1:]), kwargs
    return args, {**kwargs, "closure": lambda: loss}
