"""The statistics of BatchNorm in evaluations and saved models are those of rank 0, as under DDP."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from hf_fsdp_plugin.checkpoint.reading.resharding import load_model
from hf_fsdp_plugin.integrations.saving import manager
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config
from tests.support.training import fresh_accelerator

NUM_STEPS = 3

SETTINGS = {"fsdp_auto_wrap_policy": "NO_WRAP"}


class Normalized(nn.Module):
    """A convolution and a BatchNorm, whose buffers are of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean(-1))


VERSIONS = [1, 2]


def samples(step: int) -> torch.Tensor:
    """Samples of this rank."""
    random = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 3, 16, generator=random) * (1 + dist.get_rank())


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    for step in range(NUM_STEPS):
        model(samples(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluate(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        return float(model(samples(9)).square().mean())


def with_ddp() -> dict[str, Any]:
    model = nn.parallel.DistributedDataParallel(Normalized())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = evaluate(model)  # sends the buffers of rank 0
    return {"state": {name: tensor.clone() for name, tensor in model.module.state_dict().items()}, "loss": loss}


def prepared(version: int, model: nn.Module, **settings: Any) -> tuple[Any, Any, Any]:
    config = parallel_config("full_shard", version, dist.get_world_size(), **{**SETTINGS, **settings})
    accelerator = fresh_accelerator(config)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def save_in_every_way(folder: str, version: int) -> dict[str, Any]:
    """Train, save, and then evaluate. Returns every saved state dict, and the loss of this rank."""
    saved: dict[str, dict[str, torch.Tensor]] = {}
    with redirect_stderr(io.StringIO()) as printed:
        accelerator, model, optimizer = prepared(version, Normalized())
        train(model, optimizer)
        saved["get_state_dict"] = dict(accelerator.get_state_dict(model))  # before anything is sent
        accelerator.save_model(model, f"{folder}/model")
        for kind in ("full", "sharded", "local"):
            accelerator.state.fsdp_plugin.set_state_dict_type(kind)
            accelerator.save_state(f"{folder}/{kind}")
            manager().wait()
    if dist.get_rank() == 0:
        saved["save_model"] = load_file(f"{folder}/model/model.safetensors")
    for kind in ("full", "sharded", "local"):
        again, other, _ = prepared(version, Normalized())
        load_model(other, Path(folder) / kind)
        saved[kind] = dict(again.get_state_dict(other))
    return {"saved": saved, "loss": evaluate(model), "printed": printed.getvalue()}


@pytest.mark.parametrize("version", VERSIONS)
def test_saved_buffers_are_those_of_ddp(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    expected = two_ranks.run(with_ddp)
    ranks = two_ranks.run(save_in_every_way, str(tmp_path), version)
    for form, state in ranks[0]["saved"].items():
        assert state.keys() == expected[0]["state"].keys(), form
        for name, tensor in expected[0]["state"].items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-7, msg=f"{form}: {name}")
    assert len(ranks[0]["saved"]) == 5
    for rank, reference in zip(ranks, expected, strict=True):
        assert rank["loss"] == pytest.approx(reference["loss"], rel=1e-5)


def evaluate_first(version: int, *, inner: bool) -> dict[str, Any]:
    """Train, and evaluate before any save. Returns the buffers of this rank before and after."""
    accelerator, model, optimizer = prepared(version, Normalized())
    train(model, optimizer)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss = evaluate(accelerator.unwrap_model(model) if inner else model)
    after = [buffer.clone() for buffer in model.buffers()]
    return {"before": list(before.values()), "after": after, "loss": loss}


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("version", VERSIONS)
def test_evaluation_uses_buffers_of_rank_0(two_ranks: Ranks, version: int, inner: bool) -> None:
    expected = two_ranks.run(with_ddp)
    first, second = two_ranks.run(evaluate_first, version, inner=inner)
    assert not all(map(torch.equal, first["before"], second["before"])), "the ranks have different statistics"
    assert all(map(torch.equal, first["before"], first["after"]))
    assert all(map(torch.equal, first["after"], second["after"]))
    for rank, reference in zip((first, second), expected, strict=True):
        assert rank["loss"] == pytest.approx(reference["loss"], rel=1e-5)


def collectives_of_evaluation(version: int) -> int:
    """Number of broadcasts in the second evaluation, in which nothing has to be sent."""
    _, model, optimizer = prepared(version, Normalized())
    train(model, optimizer)
    evaluate(model)
    calls = []
    original, dist.broadcast = dist.broadcast, lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    try:
        evaluate(model)
    finally:
        dist.broadcast = original
    return len(calls)


@pytest.mark.parametrize("version", VERSIONS)
def test_buffers_are_sent_once_per_evaluation(two_ranks: Ranks, version: int) -> None:
    assert two_ranks.run(collectives_of_evaluation, version) == [0, 0]
