"""Cases that ranks run: models of which a micro-batch, a step or a rank uses only some parameters or units."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.training import fresh_accelerator

NUM_STEPS = 4
WIDTH, ROWS = 8, 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return x + torch.tanh(self.experts[expert](x))


class Net(nn.Module):
    """A tower, layers with experts, and two heads, of which each forward uses those that its arguments name."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.layers = Layer(), nn.ModuleList(Layer() for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))

    def forward(self, x: torch.Tensor, use: Use) -> torch.Tensor:
        if use.tower:
            x = self.tower(x, use.expert)
        for index, layer in enumerate(self.layers):
            if index != use.dropped:
                x = layer(x, use.expert)
        return self.heads[use.head](x)


@dataclass(frozen=True)
class Use:
    """What a forward uses."""

    tower: bool = True
    expert: int = 0
    dropped: int = -1
    head: int = 0


USES: dict[str, Callable[[int, int, int], Use]] = {
    "tower in the last micro-batch": lambda step, micro, rank: Use(tower=micro == 2),
    "tower in the first micro-batch": lambda step, micro, rank: Use(tower=micro == 0),
    "tower in every second step": lambda step, micro, rank: Use(tower=step % 2 == 1),
    "another expert in each micro-batch": lambda step, micro, rank: Use(expert=(step + micro) % 3),
    "another expert on each rank": lambda step, micro, rank: Use(expert=(step + micro + rank) % 3),
    "expert of one rank in the last micro-batch": lambda step, micro, rank: Use(expert=int(micro == 2 and rank == 1)),
    "layer drop": lambda step, micro, rank: Use(dropped=(step + micro) % 3),
    "another head in each step": lambda step, micro, rank: Use(head=step % 2),
    "another head on each rank": lambda step, micro, rank: Use(head=rank),
    "head of one rank in some steps": lambda step, micro, rank: Use(head=int(step == 2 and rank == 1)),
}
"""What a micro-batch of a step uses on a rank."""


def _model() -> Net:
    torch.manual_seed(0)
    return Net()


def _loss(model: Any, step: int, micro: int, rank: int, use: Use) -> torch.Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
    return (model(x.to(next(model.parameters()).device), use).float() - 1).square().mean()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)


def reference(name: str, accumulation: int, num_ranks: int = 2) -> dict[str, Any]:
    """Losses and weights of one process that computes the micro-batches of all ranks."""
    model = _model()
    optimizer, losses = _optimizer(model), []
    parts = [(micro, rank) for micro in range(accumulation) for rank in range(num_ranks)]
    for step in range(NUM_STEPS):
        total = torch.stack([_loss(model, step, *part, USES[name](step, *part)) for part in parts]).mean()
        total.backward()
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "weights": model.state_dict()}


def train(
    config: dict[str, Any],
    name: str,
    accumulation: int,
    every_batch: bool = False,
    steps: range = range(NUM_STEPS),
    folder: str = "",
) -> dict[str, Any]:
    """Losses and weights of a prepared model, and the number of gradients of a head that a micro-batch has not used.

    Args:
        steps: the first ones are saved to ``folder``, others are resumed from it.
    """
    accelerator = fresh_accelerator(config)
    accelerator.gradient_accumulation_steps = accumulation
    accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = every_batch
    model: Any = _model()
    model, optimizer = accelerator.prepare(model, _optimizer(model))
    losses, unused_gradients, rank = [], 0, dist.get_rank()
    if steps.start:
        accelerator.load_state(folder)
    for step in steps:
        total = torch.zeros(())
        for micro in range(accumulation):
            with accelerator.accumulate(model):
                loss = _loss(model, step, micro, rank, USES[name](step, micro, rank))
                accelerator.backward(loss)
                total += loss.detach().cpu() / accumulation
                unused = f"heads.{1 - USES[name](step, micro, rank).head}."
                unused_gradients += sum(
                    parameter.grad is not None for key, parameter in model.named_parameters() if unused in key
                )
                optimizer.step()
                optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    if folder and not steps.start:
        accelerator.save_state(folder)
    return {"losses": losses, "weights": accelerator.get_state_dict(model), "unused_gradients": unused_gradients}


def warnings_of_training(config: dict[str, Any], name: str) -> str:
    """What a training prints."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        train(config, name, 1)
    return printed.getvalue()
