"""Hooks that record what a training run does: in the first step, and in a few later ones.

After the first step, a forward costs some comparisons of numbers. Optimizer steps are examined at the powers of two, so
that the cost of a long run does not grow with its length. Nothing here waits for the accelerator.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from hf_fsdp_plugin.backends.bits import hash_bits, sum_bits
from hf_fsdp_plugin.backends.inputs import is_activation
from hf_fsdp_plugin.backends.load import BROADCAST_ATTRIBUTE
from hf_fsdp_plugin.backends.outputs import float_outputs
from hf_fsdp_plugin.backends.shard import plan_of
from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.contracts import off_without
from hf_fsdp_plugin.observe.memory import gradient_bytes
from hf_fsdp_plugin.observe.optimizer import parameters_in, unwrapped_optimizer
from hf_fsdp_plugin.observe.recomputation import Recomputation, checkpointed_modules
from hf_fsdp_plugin.observe.runs import Runs
from hf_fsdp_plugin.observe.step_watch import GradientWatch, UselessStepWatch, call_in_backward
from hf_fsdp_plugin.observe.units import UnitObservation, checkpoints_natively, observe_units
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.torch_private.functions import tree_leaves
from hf_fsdp_plugin.torch_private.modules import calls_compiled

_ATTRIBUTE = "_hf_fsdp_first_step"

ShardHashes = dict[tuple[int, int], torch.Tensor | None]
"""Number of the unit and of the parameter in it -> hash of this rank's part; ``None`` if the rank has no part of it."""


@dataclass(kw_only=True)
class FirstStep:
    """Facts recorded while the model is trained.

    Attributes:
        output_dtype: dtype of the first floating-point tensor in the model's output: the loss, if there is one.
        grads_bytes: bytes of the gradients on this rank just before the first optimizer step.
        autocast_dtypes: dtypes of autocast contexts around training forwards.
        num_steps: number of optimizer steps that have begun.
        num_evaluating: number of optimizer steps whose forwards all ran in eval mode, with gradients.
        native_checkpointing: whether Transformers' gradient checkpointing was enabled, at the steps that are examined.
        num_backwards: number of backwards before the first optimizer step.
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
        shard_hashes: hashes of the trained shards before the first optimizer step with a learning rate above 0.
        later_hashes: the same after that step, and after later ones that are examined. The weights at the end of a run
            may be those of an old checkpoint, such as the best one.
    """

    output_dtype: torch.dtype | None = None
    grads_bytes: int | None = None
    autocast_dtypes: set[torch.dtype] = field(default_factory=set)
    num_steps: int = 0
    num_evaluating: int = 0
    num_backwards: int = 0
    native_checkpointing: set[bool] = field(default_factory=set)
    unreduced: set[str] = field(default_factory=set)
    first_bit_sum: torch.Tensor | None = None
    recomputation: Recomputation | None = None
    cast_inputs: list[str] = field(default_factory=list)
    kept_inputs: list[str] = field(default_factory=list)
    batch_sizes: Runs = field(default_factory=Runs)
    accumulation: Runs = field(default_factory=Runs)
    optimized_ids: set[int] = field(default_factory=set)
    shard_hashes: ShardHashes | None = None
    later_hashes: list[ShardHashes] = field(default_factory=list)
    _num_forwards: int = 0
    _evaluates: bool = False
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

    def begin_evaluation(self) -> None:
        """Record a forward in eval mode with gradients."""
        self._evaluates = True

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
        elif self._evaluates:
            self.num_evaluating += 1
        self._num_forwards, self._evaluates = 0, False
        if self.recomputation is not None:
            self.recomputation.close()
        if self.num_steps & (self.num_steps - 1):  # not a power of two
            return
        self.native_checkpointing.add(any(map(checkpoints_natively, model.modules())))
        units = observe_units(model)
        if self.grads_bytes is None:
            self.grads_bytes = gradient_bytes(model, units)
        self.unreduced.update(unit.name or "(root)" for unit in units if unit.live.unreduced)
        if self.shard_hashes is None and _updates(optimizer):
            self.shard_hashes = hash_trained(units)

    @off_without(None)
    def after_step(self, model: nn.Module) -> None:
        """Record the state of the units after an optimizer step."""
        if self.shard_hashes is not None and not self.num_steps & (self.num_steps - 1):
            self.later_hashes.append(hash_again(self.shard_hashes, observe_units(model)))

    def _add_backward(self, _: torch.Tensor) -> None:
        if not self.num_steps:
            self.num_backwards += 1

    def count_backward(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Count the backward from the outputs of a forward, if it comes before the first optimizer step."""
        if self.num_steps:
            return False
        call_in_backward(outputs, self._add_backward)
        return True


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
            first_step.optimized_ids |= {id(parameter) for parameter in parameters_in(inner)}
            # A hook must not remove itself here: the optimizer iterates over its hooks without a copy.
            inner.register_step_pre_hook(lambda optimizer, *_: first_step.before_step(model, optimizer))
            inner.register_step_post_hook(lambda *_: first_step.after_step(model))
            if not _keeps_offloaded_gradients(model):
                GradientWatch(model, inner)
    return first_step


def _keeps_offloaded_gradients(model: nn.Module) -> bool:
    """Whether parameters have the gradients of the last step again when a backward begins, although they were zeroed.

    FSDP1 copies offloaded gradients to the same host memory in each step, and shows this memory before it does.
    """
    plan = plan_of(model)
    return plan is not None and plan.version == 1 and plan.offload_params and plan.device_type != "cpu"


def _observe_forward(model: nn.Module, first_step: FirstStep) -> None:
    device_type = next((parameter.device.type for parameter in model.parameters()), "cpu")
    plan = plan_of(model)
    watch = UselessStepWatch(model, lambda: bool(first_step.num_steps), record_first_step)
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
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if not module.training:
            first_step.begin_evaluation()
        else:
            first_step.before_forward(device_type, args, kwargs)
            if first_step.num_steps == 1:
                watch.close()

    def after_forward(module: nn.Module, args: Any, output: Any) -> None:
        floats = float_outputs(output)
        if module.training and floats:
            first_step.output_dtype = floats[0].dtype
            if torch.compiler.is_compiling() or not first_step.count_backward(floats):
                output_handle.remove()

    model.register_forward_pre_hook(before_forward, with_kwargs=True)
    cast_handle = model.register_forward_pre_hook(before_cast, prepend=True, with_kwargs=True)
    output_handle = model.register_forward_hook(after_forward)


def recorded_first_step(model: nn.Module) -> FirstStep:
    """Return the recorded facts of a model; an empty record if :func:`record_first_step` was not called."""
    return model.__dict__.get(_ATTRIBUTE) or FirstStep()


def unchanged_parameters(first_step: FirstStep, units: Sequence[UnitObservation]) -> frozenset[tuple[int, int]] | None:
    """Return the trained parameters of which this rank's part is as before the first step; ``None`` if this is unknown.

    The weights after the steps that are examined count, and those at the end of the run. A parameter of which the rank
    has no part is one of them. Keys as in ``ShardHashes``.
    """
    before = first_step.shard_hashes
    if not before:
        return None
    found = frozenset(before)
    for later in (*first_step.later_hashes, hash_again(before, units)):
        found &= _unchanged(before, later)
    return found


def _unchanged(before: ShardHashes, later: ShardHashes) -> frozenset[tuple[int, int]]:
    without = frozenset(key for key, value in before.items() if value is None)
    keys = [key for key, value in before.items() if value is not None and later.get(key) is not None]
    if not keys:
        return without
    equal = _stacked(before, keys) == _stacked(later, keys)
    return without.union(key for key, same in zip(keys, equal.tolist(), strict=True) if same)


def _stacked(hashes: ShardHashes, keys: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return hashes in one tensor on the CPU, which is one copy from an accelerator."""
    found = [value.view(torch.int64) for key in keys if (value := hashes[key]) is not None]
    return torch.stack([value.to(found[0].device) for value in found]).cpu()


def hash_trained(units: Iterable[UnitObservation]) -> ShardHashes:
    """Return hashes of the bits of this rank's part of each trained parameter, on the parameters' devices."""
    return {
        (number, index): hash_bits(part) if part.numel() else None
        for number, unit in enumerate(units)
        for index, (part, (_, _, trained)) in enumerate(zip(unit.live.parts, unit.live.places, strict=False))
        if trained and _is_hashable(part)
    }


def hash_again(before: ShardHashes, units: Sequence[UnitObservation]) -> ShardHashes:
    """Return hashes of the same parts, without those that do not exist any more."""
    hashes: ShardHashes = {}
    for (number, index), value in before.items():
        parts = units[number].live.parts if number < len(units) else ()
        if value is not None and index < len(parts) and _is_hashable(parts[index]) and parts[index].numel():
            hashes[number, index] = hash_bits(parts[index])
    return hashes


def _is_hashable(shard: torch.Tensor) -> bool:
    return type(shard.detach()) is torch.Tensor and not shard.is_meta


def _updates(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether any learning rate is above 0. Warm-up begins at 0. One in a tensor is not read."""
    rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
    return any(isinstance(rate, torch.Tensor) or rate for rate in rates)
