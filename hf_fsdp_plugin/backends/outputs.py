"""Outputs in mappings that FSDP does not look into.

FSDP starts the backward of a unit with hooks on the tensors in its output. It finds them in tensors, dicts, lists,
tuples and dataclasses, but not in other mappings, such as Transformers' ``BatchEncoding``, which sentence-transformers'
modules return. Without these hooks, FSDP1 raises in backward, and an FSDP2 root without inner units does not reduce
its gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from hf_fsdp_plugin.torch_private import fsdp1, fsdp2
from hf_fsdp_plugin.torch_private.functions import tree_leaves


def float_outputs(output: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors in the output of a model."""
    # torch's pytree supports only some of Transformers' output classes. All of them are mappings.
    leaves = tree_leaves(list(output.values()) if isinstance(output, Mapping) else output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def support_mapping_outputs(model: nn.Module) -> None:
    """Make backward work for all units of a sharded model, whatever mapping they return."""
    for module in model.modules():
        if isinstance(module, (FullyShardedDataParallel, FSDPModule)):
            module.register_forward_hook(_after_forward)


def watch_mappings(unit: Any, output: Any) -> None:
    """Register the unit's hooks for backward on the tensors of its output that FSDP has not found."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    tensors = [tensor for tensor in _unseen_tensors(output) if tensor.requires_grad]
    if not tensors:
        return
    private = fsdp1 if isinstance(unit, FullyShardedDataParallel) else fsdp2
    private.start_backward_at(unit, tensors)


def _after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    watch_mappings(module, output)


def _unseen_tensors(output: Any, unseen: bool = False) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if unseen:
            yield output
        return
    values: list[Any] = []
    if isinstance(output, Mapping):
        unseen = unseen or not isinstance(output, dict)
        values = list(output.values())
    elif isinstance(output, (list, tuple)):
        values = list(output)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        values = [getattr(output, field.name) for field in dataclasses.fields(output)]
    for value in values:
        yield from _unseen_tensors(value, unseen)
