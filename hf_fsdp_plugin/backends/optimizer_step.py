"""Run the steps of an optimizer on plain tensors instead of FSDP2's DTensors.

``local``: on this rank's shards. Their memory is shared with the parameters.
``whole``: on gathered parameters, one at a time. All ranks compute the same update, and each keeps its shard of it. The
state is whole on every rank; for the factored or projected state of these optimizers, this is less than their shards of
AdamW's state would be on a few ranks.

Between steps the optimizer has the parameters of the model, so that clipping, schedulers, the gradient scaler and
checkpoints need no special cases. The parameters are replaced by torch's step hooks, which also run if a scheduler or
Accelerate has wrapped ``step``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate

StepMode = Literal["unchanged", "local", "whole"]
_ATTRIBUTE = "_hf_fsdp_step_mode"


def step_mode(optimizer: torch.optim.Optimizer) -> StepMode:
    """Return how the optimizer's steps run."""
    mode: StepMode = getattr(optimizer, _ATTRIBUTE, "unchanged")
    return mode


def set_step_mode(optimizer: torch.optim.Optimizer, mode: StepMode) -> None:
    """Set how the optimizer's steps run, once."""
    if mode == "unchanged" or step_mode(optimizer) == mode:
        return
    setattr(optimizer, _ATTRIBUTE, mode)
    steps = _PlainSteps(whole=mode == "whole")
    optimizer.register_step_pre_hook(steps.before)
    optimizer.register_step_post_hook(steps.after)


@dataclass(slots=True)
class _Swapped:
    """A parameter of the model, and the plain tensor that the optimizer has in its place during a step."""

    group: dict[str, Any]
    index: int
    parameter: DTensor
    plain: nn.Parameter


class _PlainSteps:
    """The step hooks of one optimizer."""

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._swapped: list[_Swapped] = []
        self._groups: list[list[torch.Tensor]] = []

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Replace the parameters. In ``whole`` mode, also run the step for all of them but the last."""
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
            for place in places:
                self._swap(optimizer, *place, plain=_local_parameter(place[2]))
            return changed
        if places:
            self._step_plain_parameters(optimizer)
        for place in places:
            self._restore(optimizer)
            for group in optimizer.param_groups:
                group["params"] = []
            self._swap(optimizer, *place, plain=_whole_parameter(place[2]))
            place[0]["params"] = [self._swapped[0].plain]
            if place is not places[-1]:
                _step_without_hooks(optimizer)
        return changed

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._restore(optimizer)

    def _step_plain_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the parameters that FSDP2 does not shard, such as scalars, as usual."""
        any_grad = False
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = [p for p in parameters if not isinstance(p, DTensor)]
            any_grad = any_grad or any(p.grad is not None for p in group["params"])
        if any_grad:
            _step_without_hooks(optimizer)

    def _swap(
        self,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        index: int,
        parameter: DTensor,
        plain: nn.Parameter,
    ) -> None:
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            optimizer.state[plain] = {key: self._plain(value) for key, value in state.items()}
        if not self._whole:
            group["params"][index] = plain
        self._swapped.append(_Swapped(group, index, parameter, plain))

    def _plain(self, value: Any) -> Any:
        """Return a state value as a plain tensor: loaded state is sharded like its parameter."""
        if not isinstance(value, DTensor):
            return value
        return _full(value) if self._whole else _local(value)

    def _restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Write the updates to the shards, and give the optimizer its parameters and their state."""
        for item in self._swapped:
            _write_back(item.parameter, item.plain, whole=self._whole)
            if item.plain in optimizer.state:
                optimizer.state[item.parameter] = optimizer.state.pop(item.plain)
        self._swapped = []
        for group, parameters in zip(optimizer.param_groups, self._groups, strict=False):
            group["params"] = list(parameters)


def _step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):  # set by torch on the function that calls the hooks
        step = step.__wrapped__
    step(optimizer)


def _local_parameter(parameter: DTensor) -> nn.Parameter:
    """Return this rank's shard as a parameter with the same memory. An empty shard gets no gradient."""
    plain = nn.Parameter(_local(parameter), requires_grad=parameter.requires_grad)
    grad = parameter.grad
    if grad is not None and plain.numel():
        plain.grad = _local(grad) if isinstance(grad, DTensor) else grad
    return plain


def _whole_parameter(parameter: DTensor) -> nn.Parameter:
    """Gather a parameter and its gradient. Collective."""
    plain = nn.Parameter(_full(parameter))
    grad = parameter.grad
    plain.grad = _full(grad) if isinstance(grad, DTensor) else grad
    return plain


@torch.no_grad()
def _local(tensor: DTensor) -> torch.Tensor:
    return tensor.to_local()


@torch.no_grad()
def _full(tensor: DTensor) -> torch.Tensor:
    return tensor.full_tensor()


@torch.no_grad()
def _write_back(parameter: DTensor, plain: nn.Parameter, *, whole: bool) -> None:
    """Copy the updated tensor to the shard. Nothing is copied if the optimizer has updated the shard's memory."""
    local, updated = parameter.to_local(), plain.detach()
    if whole:
        mesh = parameter.device_mesh
        replicate: list[Placement] = [Replicate()] * mesh.ndim
        replicated = DTensor.from_local(updated, mesh, replicate, run_check=False)
        updated = replicated.redistribute(mesh, parameter.placements).to_local()
    if updated.numel() and updated.data_ptr() != local.data_ptr():
        local.copy_(updated)


def _with_evaluated_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Evaluate the closure of a step before the gradients are read. Return the new arguments; ``None`` without one."""
    # torch passes the optimizer itself as the first of ``args``.
    in_args = len(args) > 1
    closure = args[1] if in_args else kwargs.get("closure")
    if closure is None:
        return None
    with torch.enable_grad():
        loss = closure()

    def evaluated() -> Any:
        return loss

    return ((args[0], evaluated, *args[2:]), kwargs) if in_args else (args, {**kwargs, "closure": evaluated})


def _run_checks_on_parameters(optimizer: Any) -> None:
    """Let optimizers of bitsandbytes find the parameters with settings of their own, before these are replaced."""
    if not getattr(optimizer, "initialized", True) and hasattr(optimizer, "check_overrides"):
        optimizer.check_overrides()
