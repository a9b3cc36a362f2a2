"""Hooks that record what a training run does: in the first step, and in a few later ones.

After the first step, a forward costs some comparisons of numbers. Optimizer steps are examined at the powers of two, so
that the cost of a long run does not grow with its length. Nothing here waits for the accelerator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.optimizers.parameters import after_each_step, has_parameters_of, parameters_in
from hf_fsdp_plugin.backends.sharding.forwards import float_outputs
from hf_fsdp_plugin.backends.sharding.shard import plan_of
from hf_fsdp_plugin.contracts import off_without
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.observe import weights
from hf_fsdp_plugin.observe.units import checkpoints_natively, gradient_bytes, observe_units, unmanaged_parameters
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.state import find_part, parts_of
from hf_fsdp_plugin.text import format_names, plural


@dataclass(kw_only=True)
class FirstStep:
    """Facts recorded while the model is trained.

    Attributes:
        output_dtype: dtype of the first floating-point tensor in the model's output: the loss, if there is one.
        grads_bytes: bytes of the gradients on this rank just before the first optimizer step.
        autocast_dtypes: dtypes of autocast contexts around training forwards.
        num_steps: number of optimizer steps that have begun.
        has_rate: whether a learning rate was not 0 in a step. One in a tensor is not read.
        num_evaluating: number of optimizer steps whose forwards all ran in eval mode, with gradients.
        native_checkpointing: whether Transformers' gradient checkpointing was enabled, at the steps that are examined.
        unreduced: names of units with gradients that an optimizer step ignored because they were not reduced.
        batch_sizes: first dimension of the model's first input tensor -> number of training forwards with it.
        lengths: tokens per row, without those of several sequences in one row -> number of training forwards with it.
        accumulation: number of training forwards in an optimizer step -> number of steps with it.
        num_forwards: number of training forwards since the last optimizer step.
        input_sizes: all dimensions of the tensors that the last training forward got.
        is_packed: whether its inputs have positions or lengths of several sequences in one row.
        evaluates: whether a forward in eval mode, with gradients, has run since the last optimizer step.
        unsharded: the parameters that no unit had when the record began; ``None`` if this is unknown.
        num_optimized: the optimizers whose steps are observed -> number of their parameters at the last check.
        options: number of an examined step, class of the optimizer, name of an option -> its value in each group.
        optimized_ids: ``id`` of the parameters that the optimizers had when they were prepared.
        shard_hashes: hashes of the trained shards before the first optimizer step with a learning rate above 0.
        later_hashes: their hashes after that step and after later examined ones. The weights at the end of a run
            may be those of an old checkpoint, such as the best one.
    """

    output_dtype: torch.dtype | None = None
    grads_bytes: int | None = None
    autocast_dtypes: set[torch.dtype] = field(default_factory=set)
    num_steps: int = 0
    has_rate: bool = False
    num_evaluating: int = 0
    native_checkpointing: set[bool] = field(default_factory=set)
    unreduced: set[str] = field(default_factory=set)
    batch_sizes: Counter[int] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    accumulation: Counter[int] = field(default_factory=Counter)
    num_forwards: int = 0
    optimized_ids: set[int] = field(default_factory=set)
    shard_hashes: weights.ShardHashes | None = None
    later_hashes: list[weights.ShardHashes] = field(default_factory=list)
    evaluates: bool = False
    input_sizes: frozenset[int] = frozenset()
    is_packed: bool = False
    unsharded: tuple[nn.Parameter, ...] | None = None
    options: dict[tuple[int, str, str], tuple[Any, ...]] = field(default_factory=dict)
    num_optimized: WeakKeyDictionary[torch.optim.Optimizer, int] = field(default_factory=WeakKeyDictionary)

    @off_without(None)
    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Record the gradients and the state of the units before an optimizer step."""
        self.num_steps += 1
        if self.num_forwards:
            self.accumulation[self.num_forwards] += 1
        else:
            self.num_evaluating += self.evaluates
        self.num_forwards, self.evaluates = 0, False
        # Warm-up begins with a learning rate of 0. One in a tensor is not read, and without one the optimizer sets it.
        rates = [group.get("lr") for group in optimizer.param_groups]
        has_rate = any(rate is None or isinstance(rate, torch.Tensor) or rate for rate in rates)
        self.has_rate |= has_rate
        num_optimized = len(parameters_in(optimizer))
        if num_optimized > self.num_optimized.get(optimizer, 0):
            self.num_optimized[optimizer] = num_optimized
            check_added(model, optimizer)
        if self.num_steps & (self.num_steps - 1):  # not a power of two
            return
        for name in optimizer.defaults:
            values = tuple(group.get(name) for group in optimizer.param_groups)
            if all(map(_is_simple, values)):
                self.options[self.num_steps, type(optimizer).__name__, name] = values
        self.native_checkpointing.add(any(map(checkpoints_natively, model.modules())))
        units = observe_units(model)
        if self.grads_bytes is None:
            self.grads_bytes = gradient_bytes(model, units)
        self.unreduced.update(unit.name or "(root)" for unit in units if unit.live.unreduced)
        if self.shard_hashes is None and has_rate:
            self.shard_hashes = weights.hash_parts(units)

    @off_without(None)
    def after_step(self, model: nn.Module) -> None:
        """Record the state of the units after an optimizer step."""
        if self.shard_hashes is not None and not self.num_steps & (self.num_steps - 1):
            self.later_hashes.append(weights.hash_parts(observe_units(model), only=self.shard_hashes))

    def before_forward(self, device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the input of a training forward."""
        self.num_forwards += 1
        if torch.is_autocast_enabled(device_type):
            self.autocast_dtypes.add(torch.get_autocast_dtype(device_type))
        inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.dim()]
        if inputs:
            self.batch_sizes[inputs[0].shape[0]] += 1
            self.input_sizes = frozenset(size for value in inputs for size in value.shape)
            self.is_packed = any(kwargs.get(name) is not None for name in _OF_PACKED)
            if (rows := rows_of_tokens(args, kwargs)) is not None and not self.is_packed:
                self.lengths[rows[1]] += 1


def rows_of_tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows of a batch and the tokens per row; ``None`` if the model's input has no tokens."""
    for name, num_dims in (("input_ids", 2), ("inputs_embeds", 3), ("decoder_input_ids", 2)):
        value = kwargs.get(name, args[0] if name == "input_ids" and args else None)
        if isinstance(value, torch.Tensor) and value.dim() == num_dims:
            return value.shape[0], value.shape[1]
    return None


def record_first_step(model: nn.Module, *optimizers: Any) -> FirstStep:
    """Record the facts of the next training forwards and optimizer steps, and return the record of this model.

    Call it after the model is sharded, and again for each further optimizer.
    """
    if (first_step := find_part(model, FirstStep)) is None:
        first_step = FirstStep(unsharded=_unsharded_parameters(model))
        parts_of(model).put(first_step)
        _observe_forward(model, first_step)
    plan = plan_of(model)
    # FSDP1 copies offloaded gradients to the same host memory in each step, and shows this memory before it does. So
    # when a backward begins, parameters have the gradients of the last step again, although they were zeroed.
    is_offloaded = plan is not None and plan.version == 1 and plan.offload_params and plan.device_type != "cpu"
    for optimizer in optimizers:
        inner = weights.unwrapped_optimizer(optimizer)
        if inner is not None and inner not in first_step.num_optimized:
            first_step.optimized_ids |= {id(parameter) for parameter in parameters_in(inner)}
            first_step.num_optimized[inner] = len(parameters_in(inner))
            # A hook must not remove itself here: the optimizer iterates over its hooks without a copy.
            inner.register_step_pre_hook(lambda optimizer, *_: first_step.before_step(model, optimizer))
            inner.register_step_post_hook(lambda *_: first_step.after_step(model))
            if not is_offloaded:
                weights.GradientWatch(model, inner)
    return first_step


def _watch_useless_steps(model: nn.Module, first_step: FirstStep) -> Callable[[], None]:
    """Look for steps of optimizers that have neither gradients nor parameters of a model with gradients.

    An optimizer that was created before ``prepare`` and not prepared has the parameters that FSDP2 has replaced, so its
    steps change nothing. Torch accepts that; here it is an error at the second step. An optimizer step of the model
    ends the watch.

    Args:
        model: a prepared model. It is not kept alive.

    Returns:
        The function that ends the watch.
    """
    prepared, num_useless = ref(model), 0
    # Optimizers without parameters of the model: a teacher is never trained, and its students step often.
    unrelated = WeakSet[torch.optim.Optimizer]()

    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal num_useless
        if (model := prepared()) is None or first_step.num_steps:
            return
        held = parameters_in(optimizer)
        if optimizer in unrelated and weights.has_gradient(held):
            return
        if has_parameters_of(model, optimizer):
            check_added(model, optimizer)
            record_first_step(model, optimizer)  # it was not prepared
            return
        unrelated.add(optimizer)
        changes_something = weights.has_gradient(held) or weights.num_of_sharded_models(held)
        if not changes_something and weights.has_gradient(model.parameters()):
            num_useless += 1
            if num_useless == 2:
                name = type(optimizer).__name__
                message = f"two steps of {name} have changed nothing: none of its {len(held)} parameters has a "
                message += f"gradient or belongs to the prepared {type(model).__name__}."
                fix = "Pass the model and the optimizer to one accelerator.prepare(model, optimizer), or create "
                fix += f"{name} with model.parameters() after prepare()."
                raise SpecError([Problem(code="FSDP-E513", message=message, fix=fix)])

    end = after_each_step(after_step)
    finalize(model, end)
    return end


def _observe_forward(model: nn.Module, first_step: FirstStep) -> None:
    plan, end_watch = plan_of(model), _watch_useless_steps(model, first_step)
    of_parameters = next((parameter.device.type for parameter in model.parameters()), "cpu")
    device_type = plan.device_type if plan is not None else of_parameters

    def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if not module.training:
            first_step.evaluates = True
        else:
            first_step.before_forward(device_type, args, kwargs)
            if first_step.num_steps == 1:
                end_watch()

    def after_forward(module: nn.Module, args: Any, output: Any) -> None:
        if module.training and (floats := float_outputs(output)):
            first_step.output_dtype = floats[0].dtype
            output_handle.remove()

    model.register_forward_pre_hook(before_forward, with_kwargs=True)
    output_handle = model.register_forward_hook(after_forward)


def recorded_first_step(model: nn.Module) -> FirstStep:
    """Return the recorded facts of a model; an empty record if :func:`record_first_step` was not called."""
    return find_part(model, FirstStep) or FirstStep()


def _is_simple(value: Any) -> bool:
    """Whether the value of an option can be compared without a wait for the device."""
    parts = value if type(value) is tuple else (value,)
    return all(part is None or isinstance(part, (int, float, str)) for part in parts)


@off_without(None)
def _unsharded_parameters(model: nn.Module) -> tuple[nn.Parameter, ...]:
    return tuple(unmanaged_parameters(model, observe_units(model)))


@off_without({})
def added_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that were added to a model after it was prepared, by name. One rank needs no sharding."""
    known = recorded_first_step(model).unsharded
    if known is None or not dist.is_initialized() or dist.get_world_size() == 1:
        return {}
    known_ids = set(map(id, known))
    new = {id(each) for each in unmanaged_parameters(model, observe_units(model))}
    named = ((canonical_name(name), parameter) for name, parameter in model.named_parameters())
    return {name: parameter for name, parameter in named if id(parameter) in new - known_ids}


def check_added(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``SpecError`` for an optimizer with parameters that were added to the model after it was prepared."""
    held = set(map(id, parameters_in(optimizer)))
    added = [name for name, each in added_parameters(model).items() if id(each) in held and each.requires_grad]
    if added:
        message = f"{type(optimizer).__name__} has {plural(len(added), 'parameter')} that were added after prepare(): "
        message += f"{format_names(added, 3)}. They are not sharded, and their gradients are not reduced: each rank "
        message += "would train its own values."
        fix = "Add modules, adapters and parameters to the model before prepare()."
        raise SpecError([Problem(code="FSDP-E517", message=message, fix=fix)])


def warn_added(model: nn.Module) -> None:
    """Print a warning if a model that is saved has parameters that were added to it after it was prepared."""
    if added := list(added_parameters(model)):
        message = f"{plural(len(added), 'parameter')} of the saved model were added to it after prepare(): "
        message += f"{format_names(added, 3)}. They are not sharded and may differ by rank: rank 0's values are saved."
        fix = "Add modules, adapters and parameters to the model before prepare()."
        print_once(Problem(code="FSDP-W518", message=message, fix=fix))


_OF_PACKED: Final = ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q")
"""Arguments of a forward with several sequences in one row."""
