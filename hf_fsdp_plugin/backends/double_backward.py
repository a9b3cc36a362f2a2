"""Refuses a backward with ``create_graph=True`` through a sharded model.

FSDP frees the gathered weights in the backward, and computes gradients of shards without a graph. A second backward
would read freed memory, which ends the process, and FSDP2 returns gradients that cannot be differentiated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.backends.outputs import float_outputs
from hf_fsdp_plugin.problems import Problem, SpecError


def refuse_double_backward(model: nn.Module) -> None:
    """Make a backward with ``create_graph=True`` from an output of the model raise ``SpecError`` on all ranks."""
    model.register_forward_hook(_after_forward)


def _after_forward(module: nn.Module, args: Any, output: Any) -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        for tensor in (tensor for tensor in float_outputs(output) if tensor.requires_grad):
            tensor.register_hook(_refuse)


def _refuse(_: torch.Tensor) -> None:
    if torch.is_grad_enabled():  # in a backward: create_graph=True
        message = "a backward through a sharded model has create_graph=True. FSDP has no gradients of gradients."
        fix = (
            "Call backward without create_graph. For a gradient penalty, train without FSDP, or use the difference of "
            "two forwards."
        )
        raise SpecError([Problem(code="FSDP-E313", message=message, fix=fix)])
