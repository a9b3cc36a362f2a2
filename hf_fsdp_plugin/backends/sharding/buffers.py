"""Buffers that a forward changes, such as the statistics of BatchNorm, which differ between the ranks.

DDP sends rank 0's buffers to all ranks before every forward. Here they are sent only before they are used: before the
first forward of an evaluation, and before a save. So a rank's own statistics are never used or stored. Buffers that are
not in the state dict are constants and caches, and are not sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.plan.names import canonical_name, unwrapped
from hf_fsdp_plugin.state import parts_of
from hf_fsdp_plugin.torch_private.modules import buffers, non_persistent_buffers


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the canonical names and the buffers of the state dict."""
    for name, module in model.named_modules():
        for attribute, buffer in buffers(module).items():
            if buffer is not None and attribute not in non_persistent_buffers(module):
                yield canonical_name(f"{name}.{attribute}".lstrip(".")), buffer


@dataclass
class _BufferSends:
    """Whether the buffers of a model were sent since its last forward in training mode."""

    are_equal: bool = False


def watch_buffers(model: nn.Module) -> None:
    """Send rank 0's buffers before the first forward of each evaluation. Models without buffers are not watched."""
    if any(True for _ in persistent_buffers(model)):
        # The module in FSDP1's root wrapper may also be called directly.
        # As a decorator, disable would import torch's compiler in every process: a second.
        unwrapped(model).register_forward_pre_hook(torch.compiler.disable(_send_before_evaluation))


def _send_before_evaluation(model: nn.Module, args: Any) -> None:
    if model.training:
        parts_of(model).get(_BufferSends).are_equal = False
    else:
        send_buffers(model)


@torch.no_grad()
def send_buffers(model: nn.Module) -> None:
    """Overwrite the buffers of a model with those of rank 0, if it was trained since the last time. Collective."""
    model = unwrapped(model)
    sends = parts_of(model).get(_BufferSends)
    if sends.are_equal:
        return
    sends.are_equal = True
    own = [b for _, b in persistent_buffers(model) if type(b) is torch.Tensor and b.numel() and not b.is_meta]
    for buffer in own:
        received = buffer.clone(memory_format=torch.contiguous_format)
        dist.broadcast(received, 0)
        buffer.copy_(received)
