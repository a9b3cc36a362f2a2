"""Rank 0's weights for everybody, one unit at a time, so that no rank ever holds more whole weights than one unit.

This is what ``sync_module_states`` and the second half of ``cpu_ram_efficient_loading`` come to. FSDP1's own
broadcast refuses CPU modules, and FSDP2 has none; this one serves both versions on every device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.torch_private.modules import buffers, parameters

# Where the record hangs on a model that was filled from rank 0; read by the report.
BROADCAST_ATTRIBUTE = "_hf_fsdp_broadcast"


@dataclass(kw_only=True, slots=True)
class BroadcastRecord:
    """What a rank received of rank 0: equal on all ranks, but for ``num_filled``, if all hold the same weights.

    Attributes:
        num_tensors: parameters and buffers.
        num_filled: those of them that had no memory on this rank: weights that it did not load.
        checksum: over the bits of all of them, taken while they were whole.
    """

    num_tensors: int = 0
    num_filled: int = 0
    checksum: int = 0

    def add(self, tensor: torch.Tensor) -> None:
        self.num_tensors += 1
        if tensor.numel():
            # Rotated, so that equal tensors do not cancel each other out.
            # A uint64 above 2**63 cannot be read out as a number: its bits are, as int64.
            bits = int(torch.hash_tensor(tensor).view(torch.int64))
            self.checksum = (self.checksum << 1 ^ self.checksum >> 63 ^ bits) & (1 << 64) - 1


def materialize(model: nn.Module, names: Iterable[str], device: torch.device, record: BroadcastRecord) -> None:
    """Give the named parameters memory on ``device`` where they have none (meta), keeping ties.

    RAM-efficient loading leaves all ranks but the first with parameters on the meta device; the broadcast fills them.
    """
    wanted = set(names)
    replaced: dict[int, nn.Parameter] = {}
    for module_name, module in model.named_modules():
        for attribute, parameter in list(parameters(module).items()):
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) in replaced:
                parameters(module)[attribute] = replaced[id(parameter)]
            elif canonical_name(f"{module_name}.{attribute}".lstrip(".")) in wanted:
                empty = torch.empty_like(parameter, device=device)
                replaced[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                record.num_filled += 1
                parameters(module)[attribute] = replaced[id(parameter)]


def broadcast_parameters(parameters: Iterable[nn.Parameter], device: torch.device, record: BroadcastRecord) -> None:
    """Overwrite the parameters in place with rank 0's values. Every rank must call it with the same parameters."""
    for parameter in parameters:
        tensor = parameter.data.to(device).contiguous()
        dist.broadcast(tensor, src=0)
        record.add(tensor)
        parameter.data = tensor


def broadcast_buffers(model: nn.Module, device: torch.device, record: BroadcastRecord) -> None:
    """Overwrite all buffers with rank 0's values, those outside the state dict included.

    Non-persistent buffers (rotary frequencies, position ids) are zeros on the ranks that loaded no weights; nothing
    else would ever fill them, and the loss would be NaN or, worse, merely wrong.
    """
    for module in model.modules():
        for name, buffer in buffers(module).items():
            if buffer is None:
                continue
            record.num_filled += buffer.is_meta
            tensor = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device).contiguous()
            dist.broadcast(tensor, src=0)
            record.add(tensor)
            buffers(module)[name] = tensor
