"""Buffers that a forward changes, such as the statistics of BatchNorm. They differ between the ranks.

DDP sends rank 0's buffers to all ranks before every forward. Here they are sent only before they are used: before the
first forward of an evaluation, and before a save. So a rank's own statistics are never used or stored. Buffers that are
not in the state dict are constants and caches, and are not sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.plan.names import canonical_name, unwrapped
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names, plural
from hf_fsdp_plugin.torch_private.modules import buffers, non_persistent_buffers

_EQUAL: Final = "_hf_fsdp_buffers_equal"
"""Attribute of a model: whether the buffers were sent since the last forward in training mode."""


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the canonical names and the buffers of the state dict."""
    for name, module in model.named_modules():
        for attribute, buffer in buffers(module).items():
            if buffer is not None and attribute not in non_persistent_buffers(module):
                yield canonical_name(f"{name}.{attribute}".lstrip(".")), buffer


def watch_buffers(model: nn.Module) -> None:
    """Send rank 0's buffers before the first forward of each evaluation. Models without buffers are not watched."""
    if any(True for _ in persistent_buffers(model)):
        # The module in FSDP1's root wrapper may also be called directly.
        unwrapped(model).register_forward_pre_hook(_before_forward)


@torch.compiler.disable
def _before_forward(model: nn.Module, args: Any) -> None:
    if model.training:
        setattr(model, _EQUAL, False)
    else:
        send_buffers(model)


@torch.no_grad()
def send_buffers(model: nn.Module) -> None:
    """Overwrite the buffers of a model with those of rank 0, if it was trained since the last time. Collective."""
    model = unwrapped(model)
    if getattr(model, _EQUAL, False):
        return
    setattr(model, _EQUAL, True)
    own = {n: b for n, b in persistent_buffers(model) if type(b) is torch.Tensor and b.numel() and not b.is_meta}
    if not own or dist.get_world_size() == 1:
        return
    differs = _receive(list(own.values()))
    dist.all_reduce(differs, dist.ReduceOp.MAX)
    differing = [name for name, is_different in zip(own, differs.tolist(), strict=True) if is_different]
    if differing:
        print_once(
            Problem(
                code="FSDP-N640",
                message=f"the ranks have different values in {plural(len(differing), 'buffer')} of "
                f"{type(model).__name__} ({format_names(differing, 2)}). Evaluations and saved models have those of "
                "rank 0, as under DDP.",
                fix="For statistics over all ranks, use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).",
            )
        )


def _receive(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Overwrite tensors with those of rank 0, with one broadcast for each device. Return 1 for each that changes.

    The result is a tensor, so that the host waits for a device only once.
    """
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(index)
    changes = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    for indices in by_device.values():
        parts = [tensors[index].contiguous().view(-1).view(torch.uint8) for index in indices]
        data = torch.cat(parts)
        dist.broadcast(data, 0)
        received = data.split([part.numel() for part in parts])
        differing = torch.stack([(part != new).any() for part, new in zip(parts, received, strict=True)])
        changes[indices] = differing.to(changes)
        for index, new in zip(indices, received, strict=True):
            # A clone, because a view as a wider type needs an aligned address.
            tensors[index].copy_(new.clone().view(tensors[index].dtype).view(tensors[index].shape))
    return changes
