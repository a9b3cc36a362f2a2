"""Weights of torchao that cast themselves to fp8 in the all-gather of FSDP2, and their scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hf_fsdp_plugin.state import find_part, parts_of
from hf_fsdp_plugin.torch_private.fsdp2 import convert_shards, local_changes
from hf_fsdp_plugin.torch_private.modules import casts_itself, parameters


@dataclass(frozen=True, slots=True)
class _Scales:
    """Computes the scales again of a model whose weights are gathered in fp8."""

    refresh: Callable[..., None]


def casting_weights(model: nn.Module) -> dict[str, Any]:
    """Return name of a module -> its weight, for weights that convert themselves in the all-gather."""
    # Layers of PEFT return the weight of the layer inside them.
    own = ((name, parameters(module).get("weight")) for name, module in model.named_modules())
    return {name: weight for name, weight in own if casts_itself(weight)}


def plain_weights(model: nn.Module) -> Callable[[nn.Module], None]:
    """Register the plain weights instead of those that convert themselves, so that they are loaded and sharded.

    Returns:
        A function that makes the shards of the model convert themselves.
    """
    kinds: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
    for name, weight in casting_weights(model).items():
        module = model.get_submodule(name)
        (inner, *_), context = weight.__tensor_flatten__()
        kinds[id(module)] = _wrapping(type(weight.data), inner, context)
        module.weight = getattr(weight, inner)  # the parameter that the module had before the conversion

    def convert(sharded: nn.Module) -> None:
        if kinds:
            convert_shards(sharded, lambda module, name: kinds.get(id(module)) if name == "weight" else None)
            _keep_scales(sharded, [module for module in sharded.modules() if id(module) in kinds])

    return convert


def _wrapping(kind: Any, inner: str, context: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def wrap(shard: torch.Tensor) -> torch.Tensor:
        wrapped: torch.Tensor = kind.__tensor_unflatten__({inner: shard}, context, shard.shape, shard.stride())
        return wrapped

    return wrap


def _keep_scales(model: nn.Module, modules: Sequence[Any]) -> None:
    """Compute the scales of all weights in one reduction before a forward, if weights have changed since.

    Otherwise each all-gather reduces the largest element of each weight. After a checkpoint is loaded, the scales of
    the weights before would be wrong.
    """
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    seen: list[int] = []

    def refresh(*_: Any) -> None:
        precompute_float8_dynamic_scale_for_fsdp(model)
        seen[:] = local_changes(module.weight for module in modules)

    def refresh_if_changed(*_: Any) -> None:
        if seen != local_changes(module.weight for module in modules):
            refresh()

    model.register_forward_pre_hook(refresh_if_changed, prepend=True)  # before FSDP2's own hook
    parts_of(model).put(_Scales(refresh))


def refresh_scales_after_steps(optimizer: Optimizer, model: nn.Module) -> None:
    """Compute the scales of the updated weights after each step of an optimizer, as Accelerate does.

    torch does not count the changes by fused optimizers.
    """
    if (scales := find_part(model, _Scales)) is not None:
        optimizer.register_step_post_hook(scales.refresh)
