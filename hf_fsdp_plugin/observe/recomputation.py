"""Counts how often checkpointed modules are computed again in a backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name, unwrapped
from hf_fsdp_plugin.torch_private.functions import in_backward, tree_leaves
from hf_fsdp_plugin.torch_private.modules import calls_compiled

_NATIVE_LAYER = "GradientCheckpointingLayer"
"""Transformers' base class of layers that checkpoint themselves."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules that are never called."""


class Recomputation:
    """Counts calls of modules by hooks, until :meth:`close` is called.

    Attributes:
        not_recomputed: names of the modules that were computed with a graph in the forward, and not again in backward.
        num_recomputed: number of modules that were computed again.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._forwards = dict.fromkeys(modules, 0)
        self._recomputed = dict.fromkeys(modules, 0)
        self._handles = []
        for name, module in modules.items():
            self._handles.append(module.register_forward_hook(self._after(name)))
            self._handles += [part.register_forward_pre_hook(self._before(name)) for part in _called_inside(module)]

    @property
    def not_recomputed(self) -> tuple[str, ...]:
        return tuple(name for name, count in self._forwards.items() if count and not self._recomputed[name])

    @property
    def num_recomputed(self) -> int:
        return sum(count > 0 for count in self._recomputed.values())

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, name: str) -> Any:
        def before(module: nn.Module, args: Any) -> None:
            # The recompute of a checkpoint may end early, so that no hook runs after it.
            if in_backward():
                self._recomputed[name] += 1

        return before

    def _after(self, name: str) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            # Without trainable parameters before or in a module, nothing of it is saved or computed again. A reentrant
            # checkpoint computes the forward without a graph.
            if module.training and not in_backward() and torch.is_grad_enabled():
                leaves = tree_leaves(output)
                self._forwards[name] += any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves)

        return after


def _called_inside(module: nn.Module) -> list[nn.Module]:
    """Return the children of a module; the module itself if it has none.

    Transformers checkpoints the function ``forward`` of a layer, outside of which the layer's own hooks run.
    """
    children = list(module.children())
    inner = [part for child in children for part in (child.children() if type(child) in _CONTAINERS else [child])]
    return [part for part in inner if not calls_compiled(part)] or [module]


def checkpointed_modules(model: nn.Module, plan: FsdpPlan) -> dict[str, nn.Module]:
    """Return the innermost modules that the plan, or Transformers, checkpoints, by name.

    Calls of compiled modules cannot be counted, because hooks would break their graphs.
    """
    activation = plan.activation
    if activation.native:
        found = dict(native_layers(model))
    elif activation.checkpointing == "none" or plan.pre_sharded:
        found = {}
    else:
        chosen = {canonical_name(name) for unit in plan.units if unit.from_policy for name in unit.modules}
        modules = ((canonical_name(name), module) for name, module in model.named_modules())
        found = {name: unwrapped(module) for name, module in modules if name in chosen}
    return {name: module for name, module in found.items() if not calls_compiled(module)}


def native_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and layers that Transformers can checkpoint."""
    for name, module in model.named_modules():
        if any(cls.__name__ == _NATIVE_LAYER for cls in type(module).__mro__):
            yield canonical_name(name), module
