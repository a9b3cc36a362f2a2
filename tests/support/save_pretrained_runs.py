"""Cases that ranks run: ``save_pretrained`` and its relatives at the end of an Accelerate loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.rank_variables import ARRIVAL_LIMIT_VARIABLE
from tests.support.tiny import MODELS, parallel_config
from tests.support.training import adamw, fresh_accelerator, loss_of

LIMIT_S = "2"


class Trained:
    """A prepared model after one step."""

    def __init__(self, version: int, strategy: str = "full_shard", model: Any = "llama", **settings: Any) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.accelerator = fresh_accelerator(parallel_config(strategy, version, self.world_size, **settings))
        raw = MODELS[model]() if isinstance(model, str) else model()
        self.model, self.optimizer = self.accelerator.prepare(raw, adamw(raw))
        self.accelerator.backward(self.loss(0))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, step: int) -> torch.Tensor:
        return loss_of(self.model, "llama", step, self.rank, self.world_size)

    @property
    def unwrapped(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    @property
    def main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights, gathered by torch."""
        return {name: tensor.clone() for name, tensor in self.accelerator.get_state_dict(self.model).items()}

    def save(self, folder: str, model: Any = None, **arguments: Any) -> None:
        """Save as the examples of Transformers do."""
        model = self.unwrapped if model is None else model
        model.save_pretrained(folder, is_main_process=self.main, save_function=self.accelerator.save, **arguments)


def codes_of(call: Callable[[], Any]) -> list[str]:
    """Return the codes of the problems that a call raises."""
    os.environ[ARRIVAL_LIMIT_VARIABLE] = LIMIT_S
    try:
        call()
    except hfp.SpecError as error:
        return [problem.code for problem in error.problems]
    finally:
        del os.environ[ARRIVAL_LIMIT_VARIABLE]
    return []
