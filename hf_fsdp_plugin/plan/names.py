"""Canonical parameter names: those of the model before anything was wrapped around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hf_fsdp_plugin.torch_private.modules import WRAPPER_ATTRIBUTES, wrapped_module

if TYPE_CHECKING:  # readers of checkpoints need the names, and no torch
    from torch import nn


def canonical_name(name: str) -> str:
    """``model._orig_mod.layers.0._fsdp_wrapped_module.mlp`` -> ``model.layers.0.mlp``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_ATTRIBUTES)


def unwrapped(module: nn.Module) -> nn.Module:
    """The author's module inside any stack of wrappers."""
    while (inner := wrapped_module(module)) is not None:
        module = inner
    return module


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Canonical name and parameter, a tied parameter once for each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield canonical_name(name), parameter
