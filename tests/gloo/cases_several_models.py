"""Cases that ranks run: one optimizer with parameters of several models, and losses with parameters."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.integrations.saving import manager
from tests.support.tiny import global_batch, my_part, tiny_llama
from tests.support.training import fresh_accelerator

NUM_STEPS = 4


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
    manager.wait()
    problems = [problem.code for problem in hfp.report(loop.accelerator).problems if problem.severity == "error"]
    again = Loop(config, first)
    again.step(9)
    again.accelerator.load_state(folder)
    return {"run": run, "resumed": [again.step(number) for number in range(2, NUM_STEPS)], "problems": problems}


def prepare_one_of_two(config: dict[str, Any]) -> None:
    accelerator = fresh_accelerator(config)
    model, head = make_models()
    accelerator.prepare(model, make_optimizer(model, head))
