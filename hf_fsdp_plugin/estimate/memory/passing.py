"""Tensors that pass through borders and through layers that do not run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.torch_private.functions import tree_leaves, tree_map_only


class Border(torch.autograd.Function):
    """Passes tensors through, and calls a function when their gradients are computed, as FSDP's hooks do."""

    @staticmethod
    def forward(ctx: Any, on_backward: Callable[[], None], *tensors: torch.Tensor) -> Any:
        ctx.on_backward = on_backward
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.on_backward()
        return (None, *grads)


def hidden_of(args: Any, kwargs: Any) -> torch.Tensor:
    """Return the first tensor with a gradient among a layer's inputs, else the first tensor."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    return next((x for x in tensors if x.requires_grad), tensors[0])


@dataclass(frozen=True, slots=True)
class Like:
    """Stands for a tensor in the output of a layer, without its storage."""

    shape: torch.Size
    dtype: torch.dtype


def filled(output: Any, hidden: torch.Tensor, others: Iterable[torch.Tensor]) -> Any:
    """Return the output of an equal layer, with `hidden` in place of the first tensor of its shape.

    Other tensors of the output, such as a position bias, are inputs of the same shape if there are any.
    """
    used: list[bool] = []
    inputs = {(tensor.shape, tensor.dtype): tensor for tensor in others}

    def tensor_of(like: Like) -> torch.Tensor:
        if not used and like.shape == hidden.shape:
            used.append(True)
            return hidden
        if (like.shape, like.dtype) in inputs:
            return inputs[like.shape, like.dtype]
        return torch.empty(like.shape, dtype=like.dtype, device="meta")

    return tree_map_only(Like, tensor_of, output)


def template_of(output: Any) -> Any:
    """Return an output without its storages."""
    return tree_map_only(torch.Tensor, lambda tensor: Like(tensor.shape, tensor.dtype), output)


def cast(dtype: torch.dtype | None, tree: Any) -> Any:
    """Return a tree with its floating-point tensors in a dtype; unchanged for ``None``."""
    if dtype is None:
        return tree
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def with_border(inputs: Any, on_backward: Callable[[], None]) -> Any:
    """Return the inputs, with all tensors that need gradients passed through one border."""
    leaves = [x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not leaves or not torch.is_grad_enabled():
        return inputs
    passed = dict(zip(map(id, leaves), Border.apply(on_backward, *leaves), strict=True))
    return tree_map_only(torch.Tensor, lambda tensor: passed.get(id(tensor), tensor), inputs)


def at_gradient(output: Any, call: Callable[[], None]) -> None:
    """Call a function once, when the first gradient of an output is computed."""
    called: list[bool] = []

    def on_gradient(gradient: torch.Tensor) -> None:
        if not called:
            called.append(True)
            call()

    for tensor in tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(on_gradient)


def replace_forward(module: nn.Module, forward: Callable[..., Any], undo: list[Callable[[], Any]]) -> None:
    """Set an instance's ``forward``, and append to `undo` what restores it."""
    before = vars(module).get("forward")
    module.forward = forward
    undo.append(lambda: setattr(module, "forward", before) if before is not None else delattr(module, "forward"))
