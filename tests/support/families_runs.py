"""Cases that ranks run: train, save and load a model family with FSDP. Also the same steps in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.model_families import FAMILIES
from tests.support.tiny import my_part

NUM_STEPS = 3
MAX_NORM = 1.0
LEARNING_RATE = 0.05


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD. Adam amplifies the rounding errors of zero gradients, such as of a key's bias before softmax."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def step_in_parallel(accelerator: Any, family: str, model: nn.Module, optimizer: Any, step: int) -> tuple[float, float]:
    """Train one step. Return the loss of the global batch and the gradient norm before clipping."""
    part = my_part(FAMILIES[family].batch(step), accelerator.process_index, accelerator.num_processes)
    loss = FAMILIES[family].loss(model, part)
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().float()
    dist.all_reduce(total)
    return total.item() / accelerator.num_processes, float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def train_steps(accelerator: Any, family: str, model: nn.Module, optimizer: Any) -> tuple[list[float], list[float]]:
    """Train ``NUM_STEPS`` steps. Return the losses and the gradient norms."""
    steps = [step_in_parallel(accelerator, family, model, optimizer, step) for step in range(NUM_STEPS)]
    return [loss for loss, _ in steps], [norm for _, norm in steps]


def clones(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
