"""Parameters that a micro-batch, a step or a rank does not use: losses and weights are those of one process."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config
from tests.support.training import assert_same_weights, fresh_accelerator

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


VERSIONS = pytest.mark.parametrize("version", [1, 2])

LAYERS = {"fsdp_transformer_layer_cls_to_wrap": "Layer"}

EXPERTS = {"fsdp_transformer_layer_cls_to_wrap": "Layer,Linear"}

ONE_UNIT = {"fsdp_auto_wrap_policy": "NO_WRAP"}


def config_of(version: int, settings: dict[str, Any], strategy: str = "full_shard") -> dict[str, Any]:
    return parallel_config(strategy, version, 2, **settings)


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


def check(ranks: Ranks, config: dict[str, Any], name: str, accumulation: int, **loop: Any) -> None:
    run, _ = ranks.run(train, config, name, accumulation, **loop)
    expected = reference(name, accumulation)
    assert run["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert_same_weights(run["weights"], expected["weights"], 1e-6)


@VERSIONS
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", USES)
def test_unused_parameters_train_as_in_one_process(
    two_ranks: Ranks, name: str, accumulation: int, version: int
) -> None:
    check(two_ranks, config_of(version, LAYERS), name, accumulation)


@VERSIONS
@pytest.mark.parametrize("settings", [EXPERTS, ONE_UNIT], ids=["experts", "one unit"])
@pytest.mark.parametrize("name", ["another expert in each micro-batch", "another head in each step"])
def test_unused_parameters_in_other_units_train_equally(
    two_ranks: Ranks, name: str, settings: dict[str, Any], version: int
) -> None:
    check(two_ranks, config_of(version, settings), name, 3)


@VERSIONS
@pytest.mark.parametrize("strategy", ["shard_grad_op", "no_shard"])
def test_unused_parameters_of_other_strategies_train_equally(two_ranks: Ranks, strategy: str, version: int) -> None:
    check(two_ranks, config_of(version, LAYERS, strategy), "tower in the first micro-batch", 3)
    check(two_ranks, config_of(version, LAYERS, strategy), "another expert on each rank", 1)


@VERSIONS
def test_unused_parameters_of_reduced_batches_train_equally(two_ranks: Ranks, version: int) -> None:
    check(two_ranks, config_of(version, LAYERS), "another expert on each rank", 3, every_batch=True)


@VERSIONS
@pytest.mark.parametrize(
    "name",
    ["tower in the last micro-batch", "tower in the first micro-batch", "another expert on each rank",
     "expert of one rank in the last micro-batch"],
)  # fmt: skip
def test_unused_parameters_train_in_bf16(two_ranks: Ranks, name: str, version: int) -> None:
    config = {**config_of(version, LAYERS), "mixed_precision": "bf16"}
    run, _ = two_ranks.run(train, config, name, 3)
    assert run["losses"] == pytest.approx(reference(name, 3)["losses"], rel=2e-2)


@VERSIONS
def test_parameters_that_no_rank_uses_have_no_gradient(two_ranks: Ranks, version: int) -> None:
    for run in two_ranks.run(train, config_of(version, EXPERTS), "another head in each step", 1):
        assert run["unused_gradients"] == 0


@VERSIONS
@pytest.mark.parametrize("num_steps", [1, 2])
def test_training_with_unused_parameters_is_resumed(
    two_ranks: Ranks, num_steps: int, version: int, tmp_path: Path
) -> None:
    """After one step, some parameters have no optimizer state."""
    config, name, folder = config_of(version, LAYERS), "another head in each step", str(tmp_path / "state")
    two_ranks.run(train, config, name, 1, steps=range(num_steps), folder=folder)
    steps = range(num_steps, NUM_STEPS)
    run, _ = two_ranks.run(train, config, name, 1, steps=steps, folder=folder)
    expected = reference(name, 1)
    assert run["losses"] == pytest.approx(expected["losses"][num_steps:], rel=1e-6)
    assert_same_weights(run["weights"], expected["weights"], 1e-6)


def warnings_of_training(config: dict[str, Any], name: str) -> str:
    """What a training prints."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        train(config, name, 1)
    return printed.getvalue()


def test_unused_parameters_of_flat_ones_are_named(two_ranks: Ranks) -> None:
    config = config_of(1, {**LAYERS, "fsdp_use_orig_params": False})
    printed = two_ranks.run(warnings_of_training, config, "another head in each step")[0]
    assert "FSDP-W314" in printed and "heads.0.weight" in printed and "layers.0.experts.1.weight" in printed
    printed = two_ranks.run(warnings_of_training, config, "another head on each rank")[0]
    assert "heads." not in printed
