"""Divides a run of a model on the meta device into stages, by hooks on units and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hf_fsdp_plugin.backends.sharding.activation_checkpointing import save_every_second_matmul
from hf_fsdp_plugin.backends.torch_types import cast_floats
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, torch_dtype
from hf_fsdp_plugin.plan.names import is_inside
from hf_fsdp_plugin.tools.plan.estimate.divided import RankModel
from hf_fsdp_plugin.tools.plan.estimate.memory.allocations import Tracker
from hf_fsdp_plugin.tools.plan.estimate.memory.attention import DeviceAttention
from hf_fsdp_plugin.tools.plan.estimate.memory.step import Stage, StageKind, pinned_bytes
from hf_fsdp_plugin.torch_private.functions import in_backward, tree_leaves, tree_map_only
from hf_fsdp_plugin.torch_private.modules import entries_in_block, local_tensor


class Recorder:
    """Hooks on units and layers that divide the run into stages.

    Attributes:
        representatives: layer that does not run -> equal layer that runs.
    """

    def __init__(
        self,
        plan: FsdpPlan,
        rank: RankModel,
        inputs: Iterable[torch.Tensor],
        groups: Mapping[str, Iterable[str]],
        undo: ExitStack,
    ) -> None:
        """Add the hooks. ``undo`` removes them when it is closed.

        Args:
            inputs: the batch, which is not counted.
            groups: layer that runs -> equal layers that do not.
        """
        self._plan, self._undo, model = plan, undo, rank.model
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self.stages: list[Stage] = []
        ignored = [*model.parameters(), *model.buffers(), *inputs]
        self.tracker = Tracker(ignored, rank.axes, plan.device_type)
        self.representatives = {name: layer for layer, names in groups.items() for name in names}
        self._open: tuple[StageKind, str, int] | None = None
        self._missing: dict[str, set[str]] = {}
        """Unit whose forward runs -> its modules whose forward has not ended."""
        self._in_backward: dict[str, None] = {}
        self._outputs: dict[str, Any] = {}
        self._layers_in_backward: dict[str, bool] = {}
        parameters = {unit.name: map(model.get_parameter, unit.parameters) for unit in plan.units}
        self._gradients = {name: [p for p in own if p.requires_grad] for name, own in parameters.items()}
        for parameter in {id(p): p for unit in self._gradients.values() for p in unit}.values():
            handle = parameter.register_post_accumulate_grad_hook(self.tracker.count_gradient)
            undo.callback(handle.remove)
        self._checkpoint()
        for unit in plan.units:
            if not self._is_skipped(unit.name):
                self._hook_unit(unit.name, unit.modules)
        for layer, names in groups.items():
            self._hook_layer(layer)
            for name in names:
                self._skip_layer(name, layer)

    def _is_skipped(self, name: str) -> bool:
        return any(is_inside(name, layer) for layer in self.representatives)

    def mark(self, kind: StageKind, name: str, freed_grads: int = 0) -> None:
        """Close the current stage and begin another."""
        if self._open is not None:
            opened, of, grads = self._open
            self.stages.append(Stage(opened, of, grads, *self.tracker.usage_since_start()))
        if freed_grads:
            for parameter in self._gradients[name]:
                parameter.grad = None
        self._open = (kind, name, freed_grads)
        self.tracker.restart()

    def finish(self) -> None:
        """Close the last stages: units whose inputs need no gradient complete their backward at the end."""
        for unit in self._plan.units:
            if unit.name in self._in_backward:
                self._post_backward(unit.name, "last_post_backward")
        self.mark("leave", "")

    def _post_backward(self, unit: str, kind: StageKind = "post_backward") -> None:
        self._in_backward.pop(unit, None)
        grads = (local_tensor(p.grad) for p in self._gradients[unit] if p.grad is not None)
        self.mark(kind, unit, sum(grad.untyped_storage().nbytes() for grad in grads))

    def _pre_backward(self, unit: str) -> None:
        for layer in self._layers_in_backward:
            if is_inside(unit, layer):
                self._enter_backward(layer)
        if unit not in self._in_backward:
            self._in_backward[unit] = None
            self.mark("pre_backward", unit)

    def _enter_backward(self, layer: str) -> None:
        """Mark the start of a layer's backward, which comes before that of its units."""
        if not self._layers_in_backward[layer]:
            self._layers_in_backward[layer] = True
            self.mark("enter_backward", layer)

    def _hook_unit(self, name: str, members: tuple[str, ...]) -> None:
        is_root = members == ("",)
        casts_inputs = self._plan.backend == "fsdp2" or is_root
        dtype = torch_dtype(self._plan.precision.param) if casts_inputs else None
        output_dtype = torch_dtype(self._plan.precision.output) if is_root else None

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            args, kwargs = cast_floats((args, kwargs), dtype)
            if name not in self._missing:
                self._missing[name] = set(members)
                self.mark("pre_forward", name)
                args, kwargs = _with_border((args, kwargs), lambda: self._post_backward(name))
            return args, kwargs

        def after(member: str) -> Any:
            def after_forward(module: nn.Module, args: Any, output: Any) -> Any:
                missing = self._missing.get(name, set())
                missing.discard(member)
                if not missing:
                    self._missing.pop(name, None)
                    self.mark("post_forward", name)
                    _at_gradient(output, lambda: self._pre_backward(name))
                return cast_floats(output, output_dtype)

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
                return _with_border((args, kwargs), lambda: self.mark("leave_backward", name))
            return args, kwargs

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._outputs[name] = tree_map_only(torch.Tensor, lambda tensor: _Like(tensor.shape, tensor.dtype), output)
            self.mark("leave", name)
            self._layers_in_backward[name] = False
            _at_gradient(output, lambda: self._enter_backward(name))

        module = self._modules[name]
        self._undo.callback(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
        self._undo.callback(module.register_forward_hook(after).remove)

    def _skip_layer(self, name: str, representative: str) -> None:
        """Make a layer return its input, and mark the places at which its representative's stages are copied."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            hidden = next((x for x in tensors if x.requires_grad), tensors[0])
            self.mark("enter", name)
            self.tracker.counts_ops = False  # the operations of the layer are those of its representative
            (hidden,) = _Border.apply(lambda: self.mark("enter_backward", name), hidden)
            others = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            output = _output_like(self._outputs[representative], hidden, others)
            self.tracker.counts_ops = True
            return output

        replace_forward(self._modules[name], forward, self._undo)

    def _checkpoint(self) -> None:
        """Checkpoint the layers that run, as :mod:`hf_fsdp_plugin.backends.sharding.forwards` does."""
        if self._plan.activation.checkpointing == "none":
            return
        for name in [name for unit in self._plan.units if unit.from_policy for name in unit.modules]:
            if not self._is_skipped(name):
                module = self._modules[name]
                replace_forward(module, self._checkpointed(module.forward), self._undo)

    def _checkpointed(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        tracker, activation = self.tracker, self._plan.activation
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if activation.checkpointing == "selective":
            options["context_fn"] = save_every_second_matmul

        def on_device(*args: Any, **kwargs: Any) -> Any:
            tracker.counts_ops = not in_backward()  # not those of a recomputation
            try:
                with DeviceAttention(self._plan.device_type):  # in backward, the outer context has ended
                    return forward(*args, **kwargs)
            finally:
                tracker.counts_ops = True

        def pack(tensor: torch.Tensor) -> Any:
            size = tensor.numel() * tensor.element_size()
            size = pinned_bytes(size) if self._plan.device_type != "cpu" else size
            tracker.host_bytes += size
            return tensor.shape, tensor.dtype, size

        def unpack(packed: Any) -> torch.Tensor:
            shape, dtype, size = packed
            tracker.host_bytes -= size
            return torch.empty(shape, dtype=dtype, device="meta")

        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            with saved_tensors_hooks(pack, unpack) if activation.offload else nullcontext():
                return checkpoint(on_device, *args, **options, **kwargs)

        return checkpointed


def replace_forward(module: nn.Module, forward: Callable[..., Any], undo: ExitStack) -> None:
    """Set an instance's ``forward`` until `undo` is closed."""
    undo.enter_context(entries_in_block({"forward": forward}, vars(module)))


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


def _with_border(inputs: Any, on_backward: Callable[[], None]) -> Any:
    """Return the inputs, with all tensors that need gradients passed through one border."""
    leaves = _differentiable(inputs)
    if not leaves or not torch.is_grad_enabled():
        return inputs
    passed = dict(zip(map(id, leaves), _Border.apply(on_backward, *leaves), strict=True))
    return tree_map_only(torch.Tensor, lambda tensor: passed.get(id(tensor), tensor), inputs)


def _at_gradient(output: Any, call: Callable[[], None]) -> None:
    """Call a function once, when the first gradient of an output is computed."""
    if leaves := _differentiable(output):
        register_multi_grad_hook(leaves, lambda _: call(), mode="any")


def _differentiable(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


@dataclass(frozen=True, slots=True)
class _Like:
    """Stands for a tensor in the output of a layer, without its storage."""

    shape: torch.Size
    dtype: torch.dtype


def _output_like(output: Any, hidden: torch.Tensor, inputs: Iterable[torch.Tensor]) -> Any:
    """Return the output of an equal layer, with `hidden` in place of the first tensor of its shape.

    Other tensors of the output, such as a position bias, are inputs of the same shape if there are any.
    """
    known = {(tensor.shape, tensor.dtype): tensor for tensor in inputs}
    hidden_is_used = False

    def tensor_of(like: _Like) -> torch.Tensor:
        nonlocal hidden_is_used
        if not hidden_is_used and like.shape == hidden.shape:
            hidden_is_used = True
            return hidden
        found = known.get((like.shape, like.dtype))
        return torch.empty(like.shape, dtype=like.dtype, device="meta") if found is None else found

    return tree_map_only(_Like, tensor_of, output)
