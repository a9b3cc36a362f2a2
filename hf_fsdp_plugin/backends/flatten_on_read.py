"""Shards FSDP1 units without copying whole parameters: each rank reads its own part of the whole weights.

torch concatenates the parameters of a unit to a flat parameter, and keeps this rank's part of it. Here the flat
parameter is filled only where this part is. Its memory is that of the whole unit for a moment; on the CPU the system
provides only the pages that are written to.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_fsdp_plugin.backends.load import WeightLoader, master_dtype
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.torch_private.fsdp1 import flattening


def readable_in_parts(plan: FsdpPlan, loader: WeightLoader, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether a unit with these parameters can be filled by parts: all are whole in host memory, with one dtype."""
    dtypes = {master_dtype(plan, parameter) for parameter in parameters}
    return len(dtypes) == 1 and all(map(loader.can_read_parts, parameters))


@contextmanager
def flattening_on_read(
    plan: FsdpPlan, loader: WeightLoader, parameters: Sequence[nn.Parameter], kwargs: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Fill the flat parameters of units that are created in the block by parts of ``parameters``; none: as torch does.

    Args:
        kwargs: arguments of ``FullyShardedDataParallel``.

    Yields:
        The arguments to use instead.
    """
    if not parameters:
        yield kwargs
        return
    device: torch.device = kwargs["device_id"]
    flat_device = torch.device("cpu") if plan.offload_params else device
    # With a device_id other than the CPU, torch would move the whole parameters to it.
    own_kwargs = kwargs if device.type == "cpu" else {**kwargs, "device_id": None}
    with flattening(_filler(loader), master_dtype(plan, parameters[0]), flat_device), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The passed-in `module` is on CPU")
        yield own_kwargs


def _filler(loader: WeightLoader) -> Callable[[torch.Tensor, list[torch.Tensor], slice], None]:
    @torch.no_grad()
    def fill(flat: torch.Tensor, tensors: list[torch.Tensor], own: slice) -> None:
        offset = 0
        for tensor in tensors:
            start, stop = max(own.start, offset), min(own.stop, offset + tensor.numel())
            if start < stop:
                part = tensor.detach().reshape(-1)[start - offset : stop - offset]
                if isinstance(tensor, nn.Parameter):
                    loader.copy_part(flat[start:stop], part)
                else:  # padding, which has no meaning
                    flat[start:stop].copy_(part)
            offset += tensor.numel()

    return fill
