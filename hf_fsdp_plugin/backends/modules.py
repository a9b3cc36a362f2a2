"""Modules put in the place of others."""

from __future__ import annotations

from torch import nn

from hf_fsdp_plugin.torch_private.modules import children


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` wherever ``old`` hangs in ``model``; a module used twice is replaced twice."""
    for parent in list(model.modules()):
        if parent is new or parent is old:
            continue
        for attribute, child in list(children(parent).items()):
            if child is old:
                children(parent)[attribute] = new
