"""Run on ranks: checkpoints of real Trainers and Accelerators, read back by the stock tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from cases_trainer import gathered, make_trainer
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from hf_fsdp_plugin.checkpoint import save as saves


def read_dcp(folder: Path) -> dict[str, Any]:
    """As ``accelerate merge-weights`` reads it: everything, by torch's own reader."""
    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def train_and_save(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Three steps with a checkpoint at the end, and what stood in memory then."""
    trainer = make_trainer(output_dir, **{"save_strategy": "steps", "save_steps": 3, "max_steps": 3, **arguments})
    trainer.train()
    options = StateDictOptions(full_state_dict=True)
    optimizer = get_optimizer_state_dict(trainer.model, trainer.optimizer.optimizer, options=options)
    outcome = saves.last_outcome
    return {
        "weights": gathered(trainer),
        "optimizer": optimizer if dist.get_rank() == 0 else {},
        "asynchronous": outcome is not None and outcome.asynchronous,
    }
