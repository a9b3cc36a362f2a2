"""State tensors of a tensor subclass (torchao's quantized state), which the reader of checkpoints must create."""

from __future__ import annotations

from collections.abc import Callable

import torch

StateFactory = Callable[[torch.optim.Optimizer, torch.Tensor, str], torch.Tensor]
"""(optimizer, parameter, key) -> a new state tensor, as the optimizer creates it in its first step."""
_ATTRIBUTE = "_hf_fsdp_state_factory"


def set_state_factory(optimizer: torch.optim.Optimizer, factory: StateFactory) -> None:
    """Set how state tensors of a subclass are created when they are loaded. Without it they cannot be saved."""
    setattr(optimizer, _ATTRIBUTE, factory)


def state_factory(optimizer: torch.optim.Optimizer) -> StateFactory | None:
    """Return the function that was set; ``None`` for optimizers whose state has no subclasses."""
    return getattr(optimizer, _ATTRIBUTE, None)
