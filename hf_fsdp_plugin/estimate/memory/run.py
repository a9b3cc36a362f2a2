"""Runs one forward and backward pass of a model on the meta device, and records what it allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_fsdp_plugin.backends.activations import save_every_second_matmul
from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.estimate.memory.attention import attention_as_on
from hf_fsdp_plugin.estimate.memory.batch import meta_batch
from hf_fsdp_plugin.estimate.memory.layers import EqualLayers, equal_layers
from hf_fsdp_plugin.estimate.memory.profile import Stage, StageKind, StepProfile, expand
from hf_fsdp_plugin.estimate.memory.tracker import Tracker, Usage
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.torch_private.functions import tree_leaves, tree_map_only
from hf_fsdp_plugin.torch_private.modules import parameters as own_parameters


def profile_step(plan: FsdpPlan, model: nn.Module, workload: Workload) -> StepProfile:
    """Return what a forward and backward pass allocates, in the plan's dtypes and with its checkpointing.

    Layers that are equal to another one do not run: their stages are copies. `model` is unchanged afterwards.

    Args:
        model: on the meta device, not sharded.

    Raises:
        SpecError: the model cannot run on the meta device (FSDP-E810), or has other inputs than a batch of text or
            images (FSDP-E811).
    """
    batch = meta_batch(model, micro_batch=workload.micro_batch, seq_len=workload.seq_len)
    try:
        return _profile(plan, model, batch)
    except Exception as error:  # whatever the code of the model raises
        raise SpecError([_cannot_run(model, error)]) from error


def _profile(plan: FsdpPlan, model: nn.Module, batch: dict[str, torch.Tensor]) -> StepProfile:
    groups = equal_layers(model)
    skipped = {name: group for group in groups for name in group.copies}
    with ExitStack() as stack:
        stack.enter_context(_training_mode(model))
        stack.enter_context(_compute_dtypes(plan, model, skipped))
        recorder = _Recorder(plan, model, groups)
        stack.callback(recorder.remove)
        stack.enter_context(attention_as_on(plan.device_type))
        stack.enter_context(recorder.tracker)
        recorder.mark("start", "")
        loss = _loss(model(**batch))
        recorder.mark("loss", "")
        loss.backward()
        recorder.finish()
    return StepProfile(
        stages=expand(recorder.stages, recorder.representatives, recorder.unit_names),
        input_bytes=sum(tensor.untyped_storage().nbytes() for tensor in batch.values()),
    )


def _cannot_run(model: nn.Module, error: Exception) -> Problem:
    reason = (str(error).strip().splitlines() or [""])[0]
    return Problem(
        code="FSDP-E810",
        message=f"{type(model).__name__} cannot run on the meta device: {type(error).__name__}: {reason}",
        fix="Use plan --trace, or check that the model accepts a batch of this size.",
    )


def _loss(outputs: Any) -> torch.Tensor:
    """Return the loss. The other outputs are freed, as in the Trainer's ``compute_loss``."""
    loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return loss


@contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    config: Any = getattr(model, "config", None)
    training, cache = model.training, getattr(config, "use_cache", None)
    problem_type = getattr(config, "problem_type", None)  # classifiers set it in their first forward
    model.train()
    if cache is not None:
        config.use_cache = False
    try:
        yield
    finally:
        model.train(training)
        if cache is not None:
            config.use_cache = cache
        if hasattr(config, "problem_type"):
            config.problem_type = problem_type


@contextmanager
def _compute_dtypes(plan: FsdpPlan, model: nn.Module, skipped: Mapping[str, EqualLayers]) -> Iterator[None]:
    """Replace the parameters by ones in the dtype in which FSDP gathers them, except in layers that do not run."""
    dtype = torch_dtype(plan.precision.param)
    skipped_modules = {id(module) for name in skipped for module in model.get_submodule(name).modules()}
    replaced: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    new: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if id(module) in skipped_modules:
            continue
        registered = own_parameters(module)
        for name, parameter in registered.items():
            if parameter is None:
                continue
            if id(parameter) not in new:
                casts = dtype is not None and parameter.is_floating_point()
                data = torch.empty_like(parameter, device="meta", dtype=dtype if casts else parameter.dtype)
                new[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            replaced.append((registered, name, parameter))
            registered[name] = new[id(parameter)]
    try:
        yield
    finally:
        for registered, name, parameter in replaced:
            registered[name] = parameter


class _Border(torch.autograd.Function):
    """Passes tensors through, and calls a function when their gradients are computed, as FSDP's hooks do."""

    @staticmethod
    def forward(ctx: Any, on_backward: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.on_backward = on_backward
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.on_backward()
        return (None, *grads)


class _Recorder:
    """Hooks on units and layers that divide the run into stages."""

    def __init__(self, plan: FsdpPlan, model: nn.Module, groups: list[EqualLayers]) -> None:
        self._plan, self._model = plan, model
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self.stages: list[Stage] = []
        self.tracker = Tracker([*model.parameters(), *model.buffers()])
        self.representatives = {name: group.representative for group in groups for name in group.copies}
        self.unit_names = _unit_names(plan, self.representatives)
        self._undo: list[Callable[[], Any]] = []
        self._open: tuple[StageKind, str, int, Usage, int] | None = None
        self._entered: set[str] = set()
        self._missing: dict[str, set[str]] = {}
        self._in_backward: dict[str, None] = {}
        self._gradients = {unit.name: self._trainable(unit.parameters) for unit in plan.units}
        self._outputs: dict[str, Any] = {}
        self._layers_in_backward: dict[str, bool] = {}
        self._add_hooks(groups)

    def _trainable(self, names: tuple[str, ...]) -> list[nn.Parameter]:
        found = (self._parameter(name) for name in names)
        return [parameter for parameter in found if parameter.requires_grad]

    def _parameter(self, name: str) -> nn.Parameter:
        path, _, attribute = name.rpartition(".")
        parameter = own_parameters(self._modules[path])[attribute]
        assert parameter is not None
        return parameter

    def mark(self, kind: StageKind, name: str, freed_grads: int = 0) -> None:
        """Close the current stage and begin another."""
        live, peak, host = self.tracker.live, self.tracker.peak, self.tracker.host_bytes
        if self._open is not None:
            opened, of, grads, start, host_before = self._open
            self.stages.append(Stage(opened, of, peak.minus(start), live.minus(start), grads, host - host_before))
        if freed_grads:
            self._free_gradients(name)
        self._open = (kind, name, freed_grads, self.tracker.live, host)
        self.tracker.restart_peak()

    def finish(self) -> None:
        """Close the last stages: units whose inputs need no gradient complete their backward at the end."""
        for unit in self._plan.units:
            if unit.name in self._in_backward:
                self._post_backward(unit.name)
        self.mark("leave", "")

    def remove(self) -> None:
        for undo in reversed(self._undo):
            undo()

    def _free_gradients(self, unit: str) -> None:
        for parameter in self._gradients[unit]:
            parameter.grad = None

    def _post_backward(self, unit: str) -> None:
        self._in_backward.pop(unit, None)
        self.mark("post_backward", unit, sum(_grad_bytes(parameter) for parameter in self._gradients[unit]))

    def _pre_backward(self, unit: str) -> None:
        for layer in self._layers_in_backward:
            if unit == layer or unit.startswith(f"{layer}."):
                self._enter_backward(layer)
        if unit not in self._in_backward:
            self._in_backward[unit] = None
            self.mark("pre_backward", unit)

    def _enter_backward(self, layer: str) -> None:
        """Mark the start of a layer's backward, which comes before that of its units."""
        if not self._layers_in_backward[layer]:
            self._layers_in_backward[layer] = True
            self.mark("enter_backward", layer)

    # Hooks

    def _add_hooks(self, groups: list[EqualLayers]) -> None:
        for parameter in {id(p): p for unit in self._gradients.values() for p in unit}.values():
            handle = parameter.register_post_accumulate_grad_hook(self._count_gradient)
            self._undo.append(handle.remove)
        skipped = tuple(f"{name}." for name in self.representatives)
        self._checkpoint(skipped)
        for unit in self._plan.units:
            if not f"{unit.name}.".startswith(skipped) or not skipped:
                self._hook_unit(unit.name, unit.modules)
        for group in groups:
            self._hook_layer(group.representative)
            for name in group.copies:
                self._skip_layer(name, group.representative)

    def _count_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.tracker.count_gradient(parameter.grad)

    def _hook_unit(self, name: str, members: tuple[str, ...]) -> None:
        is_root = members == ("",)
        casts_inputs = self._plan.backend == "fsdp2" or is_root
        dtype = torch_dtype(self._plan.precision.param) if casts_inputs else None
        output_dtype = torch_dtype(self._plan.precision.output) if is_root else None

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            args, kwargs = _cast(dtype, (args, kwargs))
            first = name not in self._entered
            if first:
                self._entered.add(name)
                self._missing[name] = set(members)
                self.mark("pre_forward", name)
                args, kwargs = self._with_border((args, kwargs), lambda: self._post_backward(name))
            return args, kwargs

        def after(member: str) -> Any:
            def after_forward(module: nn.Module, args: Any, output: Any) -> Any:
                self._missing.get(name, set()).discard(member)
                if not self._missing.get(name):
                    self._entered.discard(name)
                    self.mark("post_forward", name)
                    self._at_gradient(output, lambda: self._pre_backward(name))
                return _cast(output_dtype, output)

            return after_forward

        for member in members:
            module = self._modules[member]
            self._undo.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            self._undo.append(module.register_forward_hook(after(member)).remove)

    def _hook_layer(self, name: str) -> None:
        """Mark the borders of a layer. Its unit's events are between them."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if name not in self._outputs:  # not in a recomputation
                self.mark("enter", name)
                return self._with_border((args, kwargs), lambda: self.mark("leave_backward", name))
            return args, kwargs

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._outputs[name] = tree_map_only(torch.Tensor, lambda tensor: _Like(tensor.shape, tensor.dtype), output)
            self.mark("leave", name)
            self._layers_in_backward[name] = False
            self._at_gradient(output, lambda: self._enter_backward(name))

        module = self._modules[name]
        self._undo.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
        self._undo.append(module.register_forward_hook(after).remove)

    def _skip_layer(self, name: str, representative: str) -> None:
        """Make a layer return its input, and mark the places at which its representative's stages are copied."""
        module = self._modules[name]

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = _hidden(args, kwargs)
            self.mark("enter", name)
            (hidden,) = _Border.apply(lambda: self.mark("enter_backward", name), hidden)
            others = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            return _filled(self._outputs[representative], hidden, others)

        _replace_forward(module, forward, self._undo)

    def _with_border(self, inputs: Any, on_backward: Callable[[], None]) -> Any:
        """Return the inputs, with all tensors that need gradients passed through one border."""
        leaves = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not leaves or not torch.is_grad_enabled():
            return inputs
        passed = dict(zip(map(id, leaves), _Border.apply(on_backward, *leaves), strict=True))
        return tree_map_only(torch.Tensor, lambda tensor: passed.get(id(tensor), tensor), inputs)

    def _at_gradient(self, output: Any, call: Callable[[], None]) -> None:
        """Call a function once, when the first gradient of an output is computed."""
        called: list[bool] = []

        def on_gradient(gradient: torch.Tensor) -> None:
            if not called:
                called.append(True)
                call()

        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(on_gradient)

    def _checkpoint(self, skipped: tuple[str, ...]) -> None:
        """Checkpoint the layers that run, as :mod:`hf_fsdp_plugin.backends.activations` does."""
        activation = self._plan.activation
        if activation.checkpointing == "none":
            return
        for unit in self._plan.units:
            for name in unit.modules if unit.from_policy else ():
                if not (skipped and f"{name}.".startswith(skipped)):
                    module = self._modules[name]
                    forward = self._checkpointed(module.forward)
                    if activation.offload:
                        forward = self._offloaded(forward)
                    _replace_forward(module, forward, self._undo)

    def _checkpointed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        selective = self._plan.activation.checkpointing == "selective"
        options: dict[str, Any] = {"context_fn": save_every_second_matmul} if selective else {}

        def on_device(*args: Any, **kwargs: Any) -> Any:
            with attention_as_on(self._plan.device_type):  # backward leaves the outer context
                return forward(*args, **kwargs)

        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(on_device, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)

        return checkpointed

    def _offloaded(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        tracker = self.tracker

        def pack(tensor: torch.Tensor) -> Any:
            size = tensor.numel() * tensor.element_size()
            tracker.host_bytes += size
            return tensor.shape, tensor.dtype, size

        def unpack(packed: Any) -> torch.Tensor:
            shape, dtype, size = packed
            tracker.host_bytes -= size
            return torch.empty(shape, dtype=dtype, device="meta")

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return forward(*args, **kwargs)

        return offloaded


def _replace_forward(module: nn.Module, forward: Callable[..., Any], undo: list[Callable[[], Any]]) -> None:
    """Set an instance's ``forward``, and append to `undo` what restores it."""
    before = vars(module).get("forward")
    module.forward = forward
    undo.append(lambda: setattr(module, "forward", before) if before is not None else delattr(module, "forward"))


def _unit_names(plan: FsdpPlan, representatives: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """Return layer that does not run, unit in its representative -> the layer's corresponding unit."""
    inside: dict[str, list[str]] = {}
    for name in set(representatives.values()):
        inside[name] = [u.name for u in plan.units if u.name == name or u.name.startswith(f"{name}.")]
    return {
        (layer, unit): layer + unit.removeprefix(representative)
        for layer, representative in representatives.items()
        for unit in inside[representative]
    }


def _cast(dtype: torch.dtype | None, tree: Any) -> Any:
    if dtype is None:
        return tree
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def _hidden(args: Any, kwargs: Any) -> torch.Tensor:
    """Return the first tensor with a gradient among a layer's inputs, else the first tensor."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    return next((x for x in tensors if x.requires_grad), tensors[0])


@dataclass(frozen=True, slots=True)
class _Like:
    """Stands for a tensor in the output of a layer, without its storage."""

    shape: torch.Size
    dtype: torch.dtype


def _filled(output: Any, hidden: torch.Tensor, others: Iterable[torch.Tensor]) -> Any:
    """Return the output of an equal layer, with `hidden` in place of the first tensor of its shape.

    Other tensors of the output, such as a position bias, are inputs of the same shape if there are any.
    """
    used: list[bool] = []
    inputs = {(tensor.shape, tensor.dtype): tensor for tensor in others}

    def tensor_of(like: _Like) -> torch.Tensor:
        if not used and like.shape == hidden.shape:
            used.append(True)
            return hidden
        if (like.shape, like.dtype) in inputs:
            return inputs[like.shape, like.dtype]
        return torch.empty(like.shape, dtype=like.dtype, device="meta")

    return tree_map_only(_Like, tensor_of, output)


def _grad_bytes(parameter: nn.Parameter) -> int:
    return 0 if parameter.grad is None else parameter.grad.untyped_storage().nbytes()
