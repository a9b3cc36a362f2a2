"""Run the steps of an optimizer on plain tensors instead of FSDP2's DTensors.

``local``: on this rank's shards. Their memory is shared with the parameters.
``whole``: on gathered parameters, one at a time. All ranks compute the same update, and each keeps its shard of it. The
state is whole on every rank; for the factored or projected state of these optimizers, this is less than their shards of
AdamW's state would be on a few ranks.

Between steps the optimizer has the parameters of the model, so that clipping, schedulers, the gradient scaler and
checkpoints need no special cases. The parameters are replaced by torch's step hooks, which also run if a scheduler or
Accelerate has wrapped ``step``.

State tensors of a subclass (torchao's quantized state) are created by a function of the optimizer when they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.optimizers.parameters import parameters_in
from hf_fsdp_plugin.backends.torch_types import shard_like

StepMode = Literal["unchanged", "local", "whole"]
StateFactory = Callable[[torch.optim.Optimizer, torch.Tensor, str], torch.Tensor]
"""(optimizer, parameter, key) -> a new state tensor, as the optimizer creates it in its first step."""
_STEP_MODE = "_hf_fsdp_step_mode"
_STATE_FACTORY = "_hf_fsdp_state_factory"


def step_mode(optimizer: torch.optim.Optimizer) -> StepMode:
    """Return how the optimizer's steps run."""
    mode: StepMode = getattr(optimizer, _STEP_MODE, "unchanged")
    return mode


def set_step_mode(optimizer: torch.optim.Optimizer, mode: StepMode) -> None:
    """Set how the optimizer's steps run, once."""
    if mode == "unchanged" or step_mode(optimizer) == mode:
        return
    setattr(optimizer, _STEP_MODE, mode)
    steps = _PlainSteps(whole=mode == "whole")
    optimizer.register_step_pre_hook(steps.before)
    optimizer.register_step_post_hook(steps.after)


def set_state_factory(optimizer: torch.optim.Optimizer, factory: StateFactory) -> None:
    """Set how state tensors of a subclass are created when they are loaded. Without it they cannot be saved."""
    setattr(optimizer, _STATE_FACTORY, factory)


def state_factory(optimizer: torch.optim.Optimizer) -> StateFactory | None:
    """Return the function that was set; ``None`` for optimizers whose state has no subclasses."""
    return getattr(optimizer, _STATE_FACTORY, None)


class _PlainSteps:
    """The step hooks of one optimizer."""

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._swapped: list[tuple[DTensor, nn.Parameter]] = []
        self._groups: list[list[torch.Tensor]] = []

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Replace the parameters. In ``whole`` mode, all but the last one are updated here."""
        self._restore(optimizer)  # of a step that raised an error
        changed = _with_evaluated_closure(args, kwargs)
        _run_checks_on_parameters(optimizer)
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
                _step_without_hooks(optimizer)
        return changed

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._restore(optimizer)

    def _step_plain_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the parameters that FSDP2 does not shard, such as scalars, as usual."""
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = [p for p in parameters if not isinstance(p, DTensor)]
        if any(parameter.grad is not None for parameter in parameters_in(optimizer)):
            _step_without_hooks(optimizer)

    def _swap(self, optimizer: torch.optim.Optimizer, parameter: DTensor) -> nn.Parameter:
        """Return the plain tensor that the optimizer has in place of a parameter during a step. Moves its state."""
        plain = nn.Parameter(_plain(parameter, self._whole), requires_grad=parameter.requires_grad)
        if parameter.grad is not None and plain.numel():  # an empty shard gets no gradient
            plain.grad = _plain(parameter.grad, self._whole)
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            optimizer.state[plain] = {key: _plain(value, self._whole) for key, value in state.items()}
        self._swapped.append((parameter, plain))
        return plain

    def _restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Write the updates to the shards, and give the optimizer its parameters and their state."""
        for parameter, plain in self._swapped:
            _write_back(parameter, plain.detach(), whole=self._whole)
            if plain in optimizer.state:
                optimizer.state[parameter] = optimizer.state.pop(plain)
        self._swapped = []
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=False):
            group["params"] = list(parameters)


def _step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):  # set by torch on the function that calls the hooks
        step = step.__wrapped__
    step(optimizer)


@torch.no_grad()
def _plain(value: Any, whole: bool) -> Any:
    """Return a parameter, a gradient or a loaded state value as a plain tensor. Collective for whole tensors."""
    if not isinstance(value, DTensor):
        return value
    return value.full_tensor() if whole else value.to_local()


@torch.no_grad()
def _write_back(parameter: DTensor, updated: torch.Tensor, *, whole: bool) -> None:
    """Copy the updated tensor to the shard. Nothing is copied if the optimizer has updated the shard's memory."""
    local = parameter.to_local()
    if whole:
        updated = shard_like(parameter, updated).to_local()
    if updated.numel() and updated.data_ptr() != local.data_ptr():
        local.copy_(updated)


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


def _run_checks_on_parameters(optimizer: Any) -> None:
    """Let optimizers of bitsandbytes find the parameters with settings of their own, before these are replaced."""
    if not getattr(optimizer, "initialized", True) and hasattr(optimizer, "check_overrides"):
        optimizer.check_overrides()
