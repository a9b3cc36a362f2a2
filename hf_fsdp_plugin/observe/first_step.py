"""Hooks that record what a training run does: in the first step, and in a few later ones.

After the first step, a forward costs some comparisons of numbers. Optimizer steps are examined at the powers of two, so
that the cost of a long run does not grow with its length. Nothing here waits for the accelerator.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from hf_fsdp_plugin.backends.bits import hash_bits, sum_bits
from hf_fsdp_plugin.backends.inputs import is_activation
from hf_fsdp_plugin.backends.load import BROADCAST_ATTRIBUTE
from hf_fsdp_plugin.backends.shard import plan_of
from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.contracts import off_without
from hf_fsdp_plugin.observe.memory import gradient_bytes
from hf_fsdp_plugin.observe.optimizer import unwrapped_optimizer
from hf_fsdp_plugin.observe.recomputation import Recomputation, checkpointed_modules
from hf_fsdp_plugin.observe.runs import Runs
from hf_fsdp_plugin.observe.units import UnitObservation, observe_units
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.torch_private.functions import tree_leaves
from hf_fsdp_plugin.torch_private.modules import calls_compiled

_ATTRIBUTE = "_hf_fsdp_first_step"


@dataclass(kw_only=True)
class FirstStep:
    """Facts recorded while the model is trained.

    Attributes:
        output_dtype: dtype of the first floating-point tensor in the model's output: the loss, if there is one.
        grads_bytes: bytes of the gradients on this rank just before the first optimizer step.
        autocast_dtypes: dtypes of autocast contexts around training forwards.
        num_steps: number of optimizer steps that have begun.
        unreduced: names of units with gradients that an optimizer step ignored because they were not reduced.
        first_bit_sum: sum of the bits of this rank's shards at the first forward; ``None`` if it was not recorded.
        recomputation: counts of recomputed modules until the first optimizer step; ``None`` before a forward.
        cast_inputs: names of arguments of the model's forward with activations in another dtype than that of the
            computation, to which they are cast.
        kept_inputs: names of arguments with other floating-point tensors, which are not cast.
        batch_sizes: first dimension of the model's first input tensor, in training forwards.
        accumulation: numbers of training forwards per optimizer step.
        observed: the optimizers whose steps are observed.
        optimized_ids: ``id`` of the parameters that the optimizers had when they were prepared.
        shard_hashes: hashes of the trained shards before the first optimizer step with a learning rate above 0, by
            name of the unit.
        later_hashes: the same after that step, and after later ones that are examined. The weights at the end of a run
            may be those of an old checkpoint, such as the best one.
    """

    output_dtype: torch.dtype | None = None
    grads_bytes: int | None = None
    autocast_dtypes: set[torch.dtype] = field(default_factory=set)
    num_steps: int = 0
    unreduced: set[str] = field(default_factory=set)
    first_bit_sum: torch.Tensor | None = None
    recomputation: Recomputation | None = None
    cast_inputs: list[str] = field(default_factory=list)
    kept_inputs: list[str] = field(default_factory=list)
    batch_sizes: Runs = field(default_factory=Runs)
    accumulation: Runs = field(default_factory=Runs)
    optimized_ids: set[int] = field(default_factory=set)
    shard_hashes: dict[str, list[torch.Tensor]] | None = None
    later_hashes: list[dict[str, list[torch.Tensor]]] = field(default_factory=list)
    _num_forwards: int = 0
    observed: WeakSet[torch.optim.Optimizer] = field(default_factory=WeakSet)

    def before_forward(self, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the input of a training forward."""
        self._num_forwards += 1
        if torch.is_autocast_enabled(device_type):
            self.autocast_dtypes.add(torch.get_autocast_dtype(device_type))
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.dim():
                self.batch_sizes.add(value.shape[0])
                break

    def before_cast(self, model: nn.Module, compute: torch.dtype, args: tuple[Any, ...], kwargs: Any) -> None:
        """Record which inputs of a forward are cast to the dtype of the computation, and which are not."""
        try:
            names = list(inspect.signature(unwrapped(model).forward).parameters)
        except (TypeError, ValueError):  # a callable of C++
            names = [str(index) for index in range(len(args))]
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            others = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dtype != compute]
            if any(map(is_activation, others)):
                self.cast_inputs.append(name)
            if not all(map(is_activation, others)):
                self.kept_inputs.append(name)

    @off_without(None)
    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Record the gradients and the state of the units before an optimizer step."""
        self.num_steps += 1
        if self._num_forwards:
            self.accumulation.add(self._num_forwards)
            self._num_forwards = 0
        if self.recomputation is not None:
            self.recomputation.close()
        if self.num_steps & (self.num_steps - 1):  # not a power of two
            return
        units = observe_units(model)
        if self.grads_bytes is None:
            self.grads_bytes = gradient_bytes(model, units)
        self.unreduced.update(unit.name or "(root)" for unit in units if unit.live.unreduced)
        if self.shard_hashes is None and _updates(optimizer):
            self.shard_hashes = hash_shards(units)

    @off_without(None)
    def after_step(self, model: nn.Module) -> None:
        """Record the state of the units after an optimizer step."""
        if self.shard_hashes is not None and not self.num_steps & (self.num_steps - 1):
            self.later_hashes.append(hash_shards(observe_units(model)))


def record_first_step(model: nn.Module, *optimizers: Any) -> FirstStep:
    """Record the facts of the next training forwards and optimizer steps, and return the record of this model.

    Call it after the model is sharded, and again for each further optimizer.
    """
    known = model.__dict__.get(_ATTRIBUTE)
    first_step: FirstStep = known or FirstStep()
    if known is None:
        model.__dict__[_ATTRIBUTE] = first_step
        _observe_forward(model, first_step)
    for optimizer in optimizers:
        inner = unwrapped_optimizer(optimizer)
        if inner is not None and inner not in first_step.observed:
            first_step.observed.add(inner)
            first_step.optimized_ids |= {id(p) for group in inner.param_groups for p in group["params"]}
            # A hook must not remove itself here: the optimizer iterates over its hooks without a copy.
            inner.register_step_pre_hook(lambda optimizer, *_: first_step.before_step(model, optimizer))
            inner.register_step_post_hook(lambda *_: first_step.after_step(model))
    return first_step


def _observe_forward(model: nn.Module, first_step: FirstStep) -> None:
    device_type = next((parameter.device.type for parameter in model.parameters()), "cpu")
    plan = plan_of(model)
    if plan is not None:
        device_type = plan.device_type
        first_step.recomputation = Recomputation(checkpointed_modules(model, plan))

    @off_without(None)
    def before_first_forward(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            first_step.first_bit_sum = sum_bits(part for unit in observe_units(model) for part in unit.live.parts)
            first_handle.remove()

    record = model.__dict__.get(BROADCAST_ATTRIBUTE)
    if record is not None and record.num_tensors + record.num_from_files:
        first_handle = model.register_forward_pre_hook(before_first_forward)
        if calls_compiled(model):
            before_first_forward()  # the hook would be compiled

    compute = torch_dtype(plan.precision.param) if plan is not None else None

    def before_cast(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if compute is not None and not torch.compiler.is_compiling():
            first_step.before_cast(module, compute, args, kwargs)
            cast_handle.remove()

    def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and not torch.compiler.is_compiling() and torch.is_grad_enabled():
            first_step.before_forward(device_type, args, kwargs)

    def after_forward(module: nn.Module, args: Any, output: Any) -> None:
        # torch's pytree supports only some of Transformers' output classes. All of them are mappings.
        leaves = tree_leaves(list(output.values()) if isinstance(output, Mapping) else output)
        floats = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        if module.training and floats:
            first_step.output_dtype = floats[0].dtype
            output_handle.remove()

    model.register_forward_pre_hook(before_forward, with_kwargs=True)
    cast_handle = model.register_forward_pre_hook(before_cast, prepend=True, with_kwargs=True)
    output_handle = model.register_forward_hook(after_forward)


def recorded_first_step(model: nn.Module) -> FirstStep:
    """Return the recorded facts of a model; an empty record if :func:`record_first_step` was not called."""
    return model.__dict__.get(_ATTRIBUTE) or FirstStep()


def shards_changed(first_step: FirstStep, units: Iterable[UnitObservation]) -> bool | None:
    """Return whether any trained shard of this rank has changed since the first step; ``None`` if this is unknown.

    The weights after the steps that are examined count, and those at the end of the run.
    """
    if not first_step.shard_hashes or not any(first_step.shard_hashes.values()):
        return None
    before = first_step.shard_hashes
    return any(_any_differs(before, later) for later in (*first_step.later_hashes, hash_shards(units)))


def _any_differs(before: Mapping[str, list[torch.Tensor]], later: Mapping[str, list[torch.Tensor]]) -> bool:
    return any(
        name not in later or len(later[name]) != len(hashes) or any(map(_differ, hashes, later[name]))
        for name, hashes in before.items()
    )


def hash_shards(units: Iterable[UnitObservation]) -> dict[str, list[torch.Tensor]]:
    """Return hashes of the bits of the shards of each unit that is trained, as tensors on the shards' devices."""
    return {
        unit.name: [hash_bits(shard) for shard in unit.live.shards if _is_hashable(shard)]
        for unit in units
        if unit.num_frozen < unit.num_params
    }


def _is_hashable(shard: torch.Tensor) -> bool:
    return type(shard.detach()) is torch.Tensor and shard.numel() > 0 and not shard.is_meta


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.view(torch.int64).to(other.device) != other.view(torch.int64))


def _updates(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether any learning rate is above 0. Warm-up begins at 0. One in a tensor is not read."""
    rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
    return any(isinstance(rate, torch.Tensor) or rate for rate in rates)
