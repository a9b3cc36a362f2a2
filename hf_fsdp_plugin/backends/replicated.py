"""Parameters of loss functions: whole on every rank, with gradients that are averaged over the ranks, as in DDP.

The module of a loss function contains the model, so it cannot be sharded as a model of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

_MARK: Final = "_hf_fsdp_replicated"


def replicate(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    """Give all ranks the values of rank 0, and average the gradients in backward. Collective.

    Parameters that are replicated already are left unchanged.
    """
    for parameter in parameters:
        if not is_replicated(parameter):
            parameter.data = parameter.data.to(device)
            dist.broadcast(parameter.data, src=0)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_average)
            setattr(parameter, _MARK, True)


def is_replicated(parameter: torch.Tensor) -> bool:
    """Return whether :func:`replicate` was called for a parameter."""
    return getattr(parameter, _MARK, False)


def _average(parameter: torch.Tensor) -> None:
    """Average an accumulated gradient. The part from earlier backwards is equal on all ranks, and does not change."""
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()
