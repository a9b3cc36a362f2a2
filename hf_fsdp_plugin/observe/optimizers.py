"""Finds the optimizers of a sharded model, and checks that their steps update its parameters.

Gradients that are never zeroed add up over all steps. Torch accepts that; here it is an error at the second optimizer
step of a run. Nothing is examined after the second step, and nothing here waits for the accelerator unless gradients
were kept between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.backends.optimizers.parameters import has_parameters_of, is_replicated, parameters_in
from hf_fsdp_plugin.backends.sharding.forwards import float_outputs
from hf_fsdp_plugin.backends.sharding.shard import sharded_models
from hf_fsdp_plugin.observe.units import UnitObservation
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.torch_private.functions import current_backward


def unwrapped_optimizer(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the torch optimizer inside Accelerate's ``AcceleratedOptimizer``."""
    while optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def optimizers_of(model: nn.Module, optimizers: Sequence[Any]) -> list[Any]:
    """Return the optimizers that update parameters of this model."""
    return [optimizer for optimizer in optimizers if has_parameters_of(model, optimizer)]


def trained_pair(models: Sequence[nn.Module], optimizers: Sequence[Any]) -> tuple[nn.Module, Sequence[Any]]:
    """Return the first model that is updated by optimizers, and these optimizers.

    If no optimizer updates any of the models, return the first model and all optimizers, so that the report contains
    the problem.
    """
    pairs = ((model, optimizers_of(model, optimizers)) for model in models)
    return next(((model, own) for model, own in pairs if own), (models[0], optimizers))


def check_optimizers(
    model: nn.Module,
    units: Sequence[UnitObservation],
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    prepared_ids: Collection[int] = (),
) -> list[Problem]:
    """Check that the optimizers together have exactly the trainable parameters of the model.

    An optimizer that was created before wrapping updates the old, unsharded parameters, and the loss stays constant.

    Args:
        prepared_ids: ``id`` of the parameters that the optimizers had when they were prepared.
    """
    if not optimizers:
        return []
    copies = frozenset[int]().union(*(unit.live.known("copy_ids", frozenset()) for unit in units))
    own = {id(parameter) for parameter in model.parameters()}.union(*(unit.live.parameter_ids for unit in units))
    held = {id(parameter) for optimizer in optimizers for parameter in parameters_in(optimizer)}
    problems = []
    for optimizer in optimizers:
        parameters, name = parameters_in(optimizer), type(optimizer).__name__
        foreign = [each for each in parameters if id(each) not in own and not is_replicated(each)]
        if num_foreign := len(foreign) - num_of_sharded_models(foreign):
            message = (
                f"{num_foreign} of the {len(parameters)} parameters of {name} do not belong to the sharded model. "
            )
            message += (
                "The optimizer was created before wrapping, so it updates parameters that the model does not use."
            )
            fix = "Create the optimizer after preparing the model, or pass both to one prepare() call."
            problems.append(Problem(code="FSDP-E504", message=message, fix=fix))
        if num_copies := sum(id(parameter) in copies for parameter in parameters):
            message = f"{num_copies} of the {len(parameters)} parameters of {name} are gathered copies, which "
            message += "FSDP frees. Updates of them are lost."
            fix = "Create the optimizer before the first forward, or pass model and optimizer to one prepare() call."
            problems.append(Problem(code="FSDP-E504", message=message, fix=fix))
    # A model whose parameters are gathered now, for example after an evaluation, has the shards all the same.
    trained = {id(p) for p in model.parameters() if p.requires_grad and id(p) not in copies}
    left_out = trained - held
    if problems or not left_out:
        return problems
    names = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
    if num_removed := len(left_out.intersection(prepared_ids)):
        message = f"{num_removed} of {len(trained)} trainable parameters are no longer in {names}, which had them when "
        message += "it was prepared: they are not updated."
        fix = "Do not change the parameter groups after prepare(). If the parameters are meant to stay constant, set "
        fix += "requires_grad = False before prepare()."
        return [Problem(code="FSDP-E509", message=message, fix=fix)]
    message = f"{len(left_out)} of {len(trained)} trainable parameters are in no parameter group of {names}: "
    message += "they are not updated."
    fix = "Pass all trainable parameters to the optimizer, or set requires_grad = False on the others."
    return [Problem(code="FSDP-W505", message=message, fix=fix)]


def num_of_sharded_models(parameters: Sequence[torch.Tensor]) -> int:
    """Return how many of the parameters belong to any sharded model. This rank may have no gradients of its shards."""
    known = {id(parameter) for model in sharded_models() for parameter in model.parameters()} if parameters else ()
    return sum(id(parameter) in known for parameter in parameters)


def call_in_backward(outputs: Sequence[torch.Tensor], hook: Callable[[torch.Tensor], None]) -> None:
    """Call ``hook`` when the backward from the outputs of a forward begins."""
    first = next((output for output in outputs if output.requires_grad), None)
    if first is not None:
        first.register_hook(hook)


_last_backward = WeakKeyDictionary[torch.optim.Optimizer, int]()
"""The number of the last backward that has begun for a model of an optimizer."""


class GradientWatch:
    """Looks at the gradients of an optimizer's parameters when backwards begin, between its first and second step.

    A script may zero them at any time before that. If another backward begins with the gradients of the last step, but
    a later one without them, as when a discriminator passes gradients to a generator, they were zeroed, too. Other
    gradients than those of the step are from this backward: a penalty on the weights is differentiated first.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = ref(optimizer)
        self._has_stepped = self._is_done = False
        self._stepped: torch.Tensor | None = None
        """Norms of the gradients of the first step; ``None`` without gradients."""
        self._kept: list[torch.Tensor | None] = []
        """Norms of these gradients when each later backward begins."""
        self._forward_handle = model.register_forward_hook(self._after_forward)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._has_stepped and not torch.compiler.is_compiling():
            call_in_backward(float_outputs(output), self._before_backward)

    def _before_backward(self, _: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None or self._is_done:
            return
        backward = current_backward()
        if backward is not None and _last_backward.get(optimizer) == backward:
            # Gradients are being reduced on FSDP's stream: of another model of the optimizer, whose watch is enough.
            if not self._kept:
                self._is_done = True
                self._forward_handle.remove()
            return
        if backward is not None:
            _last_backward[optimizer] = backward
        self._kept.append(_norms(optimizer))

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._has_stepped:
            self._has_stepped = True
            self._stepped = _norms(optimizer)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._kept or self._is_done:
            return
        self._is_done = True
        self._forward_handle.remove()
        if all(_is_same(norms, self._stepped) for norms in self._kept):
            message = f"the gradients of the first step of {type(optimizer).__name__} were not set to zero before the "
            message += "second one, which adds those of both steps."
            fix = "Call optimizer.zero_grad() after each optimizer.step()."
            raise SpecError([Problem(code="FSDP-E514", message=message, fix=fix)])


@torch.no_grad()
def _norms(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """Return the norms of this rank's parts of the gradients."""
    gradients = [p.grad for p in parameters_in(optimizer) if p.grad is not None]
    locals_ = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    norms = [torch.linalg.vector_norm(part).float() for part in locals_ if part.numel()]
    return torch.stack([norm.to(norms[0].device) for norm in norms]) if norms else None


def _is_same(norms: torch.Tensor | None, stepped: torch.Tensor | None) -> bool:
    """Whether the gradients are those of the step, and not zero."""
    return norms is not None and stepped is not None and bool(norms.any()) and torch.equal(norms, stepped)


def has_gradient(parameters: Any) -> bool:
    """Return whether a parameter has a gradient."""
    return any(parameter.grad is not None for parameter in parameters if parameter.is_leaf)
