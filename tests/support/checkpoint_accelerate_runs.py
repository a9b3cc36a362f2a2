"""Cases that ranks run: an Accelerate loop with ``save_state``, ``load_state`` and ``save_model``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration

import hf_fsdp_plugin as hfp
from tests.support.tiny import global_batch, my_part, parallel_config, tiny_llama


class Loop:
    """A prepared model, optimizer and scheduler, and their steps."""

    def __init__(self, version: int, *, project: ProjectConfiguration | None = None, **settings: Any) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        spec = hfp.load_spec(parallel_config("full_shard", version, self.world_size, **settings))
        self.accelerator = hfp.accelerator(spec, project_config=project)
        raw = tiny_llama()
        optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(raw, optimizer, scheduler)

    def step(self, number: int) -> float:
        batch = my_part(global_batch(number), self.rank, self.world_size)
        loss = self.model(**batch).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(self.accelerator.reduce(loss.detach(), "mean"))

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.accelerator.get_state_dict(self.model).items()}


def trained_loop(version: int, num_steps: int = 2, **settings: Any) -> Loop:
    """Return a loop after ``num_steps`` steps."""
    loop = Loop(version, **settings)
    for number in range(num_steps):
        loop.step(number)
    return loop
