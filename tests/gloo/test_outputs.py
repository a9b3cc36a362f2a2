"""Backward works for units whose outputs are in mappings that FSDP does not look into."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config, simple_batch
from tests.support.training import fresh_accelerator, sgd

NUM_STEPS = 3


class MappingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, hidden: torch.Tensor) -> UserDict[str, Any]:
        return UserDict(states=(hidden + self.linear(hidden).relu(),), name="layer")


class MappingModel(nn.Module):
    """Each unit gets its input from a mapping and returns one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(MappingLayer() for _ in range(2))
        self.head = nn.Linear(256, 1)

    def forward(self, hidden: torch.Tensor) -> UserDict[str, Any]:
        for layer in self.layers:
            (hidden,) = layer(hidden)["states"]
        return UserDict(scores=[self.head(hidden)], inputs=hidden)


UNITS: dict[str, dict[str, Any]] = {
    "layers": {"fsdp_transformer_layer_cls_to_wrap": "MappingLayer"},
    "root": {"fsdp_auto_wrap_policy": "NO_WRAP"},
    "checkpointed": {"fsdp_transformer_layer_cls_to_wrap": "MappingLayer", "fsdp_activation_checkpointing": True},
}


def loss_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    (scores,) = model(rows)["scores"]
    return (scores - 1).square().mean()


def train(config: dict[str, Any], *, calls_inner: bool) -> tuple[list[float], list[float]]:
    """Train with the sharded model or the module inside it. Return the losses, and those of one process."""
    accelerator = fresh_accelerator(config)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    bare = MappingModel()
    bare_optimizer = sgd(bare)
    sharded: Any = MappingModel()
    sharded, optimizer = accelerator.prepare(sharded, sgd(sharded))
    called = accelerator.unwrap_model(sharded) if calls_inner else sharded
    found, expected = [], []
    for step in range(NUM_STEPS):
        rows = simple_batch(step)
        loss = loss_of(bare, rows)
        loss.backward()
        bare_optimizer.step()
        bare_optimizer.zero_grad()
        expected.append(loss.item())
        loss = loss_of(called, rows.chunk(world_size)[rank])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        found.append(total.item() / world_size)
    return found, expected


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("calls_inner", [False, True], ids=["model", "unwrapped"])
def test_models_that_return_mappings_train_as_one_process(
    two_ranks: Ranks, version: int, units: str, calls_inner: bool
) -> None:
    config = parallel_config("full_shard", version, 2, **UNITS[units])
    found, expected = two_ranks.run(train, config, calls_inner=calls_inner)[0]
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == NUM_STEPS
