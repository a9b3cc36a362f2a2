"""Divides a run of a model on the meta device into stages, by hooks on units and layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_fsdp_plugin.backends.sharding.module_forwards import save_every_second_matmul
from hf_fsdp_plugin.backends.torch_types import torch_dtype
from hf_fsdp_plugin.estimate.memory.meta_model import (
    Border,
    EqualLayers,
    at_gradient,
    cast_floats,
    copy_output,
    hidden_of,
    replace_forward,
    template_of,
    with_border,
)
from hf_fsdp_plugin.estimate.memory.step import Stage, StageKind, Usage
from hf_fsdp_plugin.estimate.memory.tracker import DeviceAttention, Tracker
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.torch_private.functions import in_backward, tree_leaves


class Recorder:
    """Hooks on units and layers that divide the run into stages."""

    def __init__(self, plan: FsdpPlan, model: nn.Module, groups: list[EqualLayers], undo: ExitStack) -> None:
        """Add the hooks. ``undo`` removes them when it is closed."""
        self._plan, self._model = plan, model
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self.stages: list[Stage] = []
        self.tracker = Tracker([*model.parameters(), *model.buffers()])
        self.representatives = {name: group.representative for group in groups for name in group.copies}
        self._undo = undo
        self._open: tuple[StageKind, str, int, Usage, int] | None = None
        self._entered: set[str] = set()
        self._missing: dict[str, set[str]] = {}
        self._in_backward: dict[str, None] = {}
        parameters = {unit.name: map(model.get_parameter, unit.parameters) for unit in plan.units}
        self._gradients = {name: [p for p in own if p.requires_grad] for name, own in parameters.items()}
        self._outputs: dict[str, Any] = {}
        self._layers_in_backward: dict[str, bool] = {}
        self._add_hooks(groups)

    def mark(self, kind: StageKind, name: str, freed_grads: int = 0) -> None:
        """Close the current stage and begin another."""
        self.tracker.update_peak()
        live, peak, host = self.tracker.live, self.tracker.peak, self.tracker.host_bytes
        if self._open is not None:
            opened, of, grads, start, host_before = self._open
            most = self.tracker.most_activations - start.activations
            usage = peak.minus(start), live.minus(start)
            self.stages.append(Stage(opened, of, *usage, grads, host - host_before, most, self.tracker.ops))
        if freed_grads:
            for parameter in self._gradients[name]:
                parameter.grad = None
        self._open = (kind, name, freed_grads, self.tracker.live, host)
        self.tracker.restart()

    def finish(self) -> None:
        """Close the last stages: units whose inputs need no gradient complete their backward at the end."""
        for unit in self._plan.units:
            if unit.name in self._in_backward:
                self._post_backward(unit.name)
        self.mark("leave", "")

    def _post_backward(self, unit: str) -> None:
        self._in_backward.pop(unit, None)
        grads = (parameter.grad for parameter in self._gradients[unit])
        self.mark("post_backward", unit, sum(grad.untyped_storage().nbytes() for grad in grads if grad is not None))

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
            self._undo.callback(handle.remove)
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
            args, kwargs = cast_floats(dtype, (args, kwargs))
            first = name not in self._entered
            if first:
                self._entered.add(name)
                self._missing[name] = set(members)
                self.mark("pre_forward", name)
                args, kwargs = with_border((args, kwargs), lambda: self._post_backward(name))
            return args, kwargs

        def after(member: str) -> Any:
            def after_forward(module: nn.Module, args: Any, output: Any) -> Any:
                self._missing.get(name, set()).discard(member)
                if not self._missing.get(name):
                    self._entered.discard(name)
                    self.mark("post_forward", name)
                    at_gradient(output, lambda: self._pre_backward(name))
                return cast_floats(output_dtype, output)

            return after_forward

        for member in members:
            module = self._modules[member]
            self._undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            self._undo.callback(module.register_forward_hook(after(member)).remove)

    def _hook_layer(self, name: str) -> None:
        """Mark the borders of a layer. Its unit's events are between them."""

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if name not in self._outputs:  # not in a recomputation
                self.mark("enter", name)
                return with_border((args, kwargs), lambda: self.mark("leave_backward", name))
            return args, kwargs

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._outputs[name] = template_of(output)
            self.mark("leave", name)
            self._layers_in_backward[name] = False
            at_gradient(output, lambda: self._enter_backward(name))

        module = self._modules[name]
        self._undo.callback(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
        self._undo.callback(module.register_forward_hook(after).remove)

    def _skip_layer(self, name: str, representative: str) -> None:
        """Make a layer return its input, and mark the places at which its representative's stages are copied."""
        module = self._modules[name]

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = hidden_of(args, kwargs)
            self.mark("enter", name)
            self.tracker.counts_ops = False  # the operations of the layer are those of its representative
            (hidden,) = Border.apply(lambda: self.mark("enter_backward", name), hidden)
            others = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            output = copy_output(self._outputs[representative], hidden, others)
            self.tracker.counts_ops = True
            return output

        replace_forward(module, forward, self._undo)

    def _checkpoint(self, skipped: tuple[str, ...]) -> None:
        """Checkpoint the layers that run, as :mod:`hf_fsdp_plugin.backends.sharding.module_forwards` does."""
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
                    replace_forward(module, forward, self._undo)

    def _checkpointed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        selective = self._plan.activation.checkpointing == "selective"
        options: dict[str, Any] = {"context_fn": save_every_second_matmul} if selective else {}

        def on_device(*args: Any, **kwargs: Any) -> Any:
            self.tracker.counts_ops = not in_backward()  # not those of a recomputation
            try:
                with DeviceAttention(self._plan.device_type):  # in backward, the outer context has ended
                    return forward(*args, **kwargs)
            finally:
                self.tracker.counts_ops = True

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
