"""Canonical parameter names: the names in the model without any wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hf_fsdp_plugin.torch_private.modules import WRAPPER_ATTRIBUTES, wrapped_module

if TYPE_CHECKING:  # checkpoint readers import this module without torch
    from torch import nn


def canonical_name(name: str) -> str:
    """Return ``model.layers.0.mlp`` for ``model._orig_mod.layers.0._fsdp_wrapped_module.mlp``."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_ATTRIBUTES)


def is_inside(name: str, outer: str) -> bool:
    """Return whether a module is another one or inside it, by canonical names."""
    return name == outer or not outer or name.startswith(f"{outer}.")


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside all of its wrappers."""
    while (inner := wrapped_module(module)) is not None:
        module = inner
    return module


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield canonical names and parameters. A tied parameter is yielded under each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield canonical_name(name), parameter
