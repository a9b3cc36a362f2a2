"""One optimizer with parameters of several models trains, saves and resumes like an unsharded one."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.integrations.saving import manager
from tests.support.matrices import slow
from tests.support.ranks import RankError, Ranks
from tests.support.tiny import global_batch, my_part, tiny_llama
from tests.support.training import fresh_accelerator

NUM_STEPS = 4


class Loop:
    """A loop over two models with one optimizer."""

    def __init__(self, config: dict[str, Any], first: str) -> None:
        self.accelerator = fresh_accelerator(config)
        model, head = make_models()
        if first == "models":
            model, head = self.accelerator.prepare(model, head)
            self.models, self.optimizer = (model, head), self.accelerator.prepare(make_optimizer(model, head))
        else:
            model, head, self.optimizer = self.accelerator.prepare(model, head, make_optimizer(model, head))
            self.models = (model, head)

    def step(self, number: int) -> tuple[float, float]:
        parts = my_part(global_batch(number), self.accelerator.process_index, self.accelerator.num_processes)
        with self.accelerator.accumulate(*self.models):
            loss = loss_of(*self.models, parts)
            self.accelerator.backward(loss)
            parameters = list(chain(*(model.parameters() for model in self.models)))
            norm = self.accelerator.clip_grad_norm_(parameters, 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.accelerator.reduce(loss.detach(), "mean").item(), norm.item()


def make_models() -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    return tiny_llama(layers=2), nn.Sequential(nn.Linear(96, 12), nn.Tanh(), nn.Linear(12, 1))


def make_optimizer(model: nn.Module, head: nn.Module) -> torch.optim.Optimizer:
    """Groups with parameters of both models. FSDP1's shards have one dimension, so the names decide."""
    both = list(chain(model.named_parameters(), head.named_parameters()))
    weights = [parameter for name, parameter in both if "norm" not in name and "bias" not in name]
    others = [parameter for name, parameter in both if "norm" in name or "bias" in name]
    return torch.optim.AdamW([{"params": weights}, {"params": others, "weight_decay": 0.0}], lr=1e-2)


def loss_of(model: Any, head: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(**batch)
    return output.loss + head(output.logits).square().mean()


def unsharded(num_steps: int = NUM_STEPS) -> list[tuple[float, float]]:
    model, head = make_models()
    optimizer, run = make_optimizer(model, head), []
    for number in range(num_steps):
        loss = loss_of(model, head, global_batch(number))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(chain(model.parameters(), head.parameters()), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        run.append((loss.item(), norm.item()))
    return run


def train(config: dict[str, Any], first: str, folder: str) -> dict[str, Any]:
    """Train, save after the second step, and repeat the last steps from the checkpoint in new models."""
    loop = Loop(config, first)
    run = [loop.step(number) for number in range(2)]
    loop.accelerator.save_state(folder)
    run += [loop.step(number) for number in range(2, NUM_STEPS)]
    manager().wait()
    problems = [problem.code for problem in hfp.report(loop.accelerator).problems if problem.severity == "error"]
    again = Loop(config, first)
    again.step(9)
    again.accelerator.load_state(folder)
    return {"run": run, "resumed": [again.step(number) for number in range(2, NUM_STEPS)], "problems": problems}


@pytest.mark.parametrize("first", ["models", "together"])
@pytest.mark.parametrize(
    ("version", "kind"),
    [(1, "FULL"), (2, "SHARDED"), slow(1, "SHARDED"), slow(1, "LOCAL"), slow(2, "FULL")],
)
def test_optimizer_of_two_models(two_ranks: Ranks, tmp_path: Path, version: int, kind: str, first: str) -> None:
    config = {"fsdp_config": {"fsdp_version": version, "fsdp_state_dict_type": f"{kind}_STATE_DICT"}}
    config |= {"use_cpu": True, "distributed_type": "FSDP"}
    result = two_ranks.run(train, config, first, str(tmp_path / "saved"))[0]
    expected = unsharded()
    assert result["run"] == [pytest.approx(pair, rel=1e-5) for pair in expected]
    assert result["resumed"] == [pytest.approx(pair, rel=1e-6) for pair in result["run"][2:]]
    assert result["problems"] == []


def prepare_one_of_two(config: dict[str, Any]) -> None:
    accelerator = fresh_accelerator(config)
    model, head = make_models()
    accelerator.prepare(model, make_optimizer(model, head))


@pytest.mark.parametrize("version", [1, 2])
def test_optimizer_of_unprepared_model_is_refused(two_ranks: Ranks, version: int) -> None:
    config = {"use_cpu": True, "distributed_type": "FSDP", "fsdp_config": {"fsdp_version": version}}
    with pytest.raises(RankError, match="FSDP-E604"):
        two_ranks.run(prepare_one_of_two, config)
