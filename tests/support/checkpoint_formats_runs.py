"""Cases that ranks run: checkpoints written by stock Accelerate, and the tensors that they must contain."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

FULL = StateDictOptions(full_state_dict=True)


def save_full_fsdp1(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write the files that Accelerate writes on GPUs.

    On CPU ranks, FSDP1 crashes when it gathers the model, and returns one buffer for ``exp_avg`` and ``exp_avg_sq``.
    """
    states = {
        "pytorch_model_fsdp": get_model_state_dict(model, options=FULL),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=FULL),
    }
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        for name, state in states.items():
            torch.save(state, folder / f"{name}.bin")
