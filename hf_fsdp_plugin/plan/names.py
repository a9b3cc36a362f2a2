"""Canonical parameter names: those of the model before anything was wrapped around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # readers of checkpoints need the names, and no torch
    from torch import nn

# The attribute under which each wrapper keeps the wrapped module: FSDP1, activation checkpointing, torch.compile.
WRAPPER_ATTRIBUTES = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def canonical_name(name: str) -> str:
    """``model._orig_mod.layers.0._fsdp_wrapped_module.mlp`` -> ``model.layers.0.mlp``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_ATTRIBUTES)


def unwrapped(module: nn.Module) -> nn.Module:
    """The author's module inside any stack of wrappers."""
    while True:
        inner = next((m for a in WRAPPER_ATTRIBUTES if (m := module._modules.get(a)) is not None), None)
        if inner is None:
            return module
        module = inner


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Canonical name and parameter, a tied parameter once for each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield canonical_name(name), parameter
