"""Resuming from a checkpoint of DeepSpeed: the schedule of the learning rate, and what such a checkpoint lacks.

Weights and optimizer state are read as those of any format (:mod:`hf_fsdp_plugin.checkpoint.formats.deepspeed`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_fsdp_plugin.backends.ranks.agreement import broadcast_object, on_all_ranks
from hf_fsdp_plugin.checkpoint.errors import problem
from hf_fsdp_plugin.checkpoint.formats.deepspeed import read_engine_state
from hf_fsdp_plugin.checkpoint.formats.optimizer_state import unsupported_values
from hf_fsdp_plugin.checkpoint.names import ACCELERATE_RNG, MANIFEST_NAME, TRAINER_RNG
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.text import plural

_STEPS, _SKIPPED, _SCHEDULE = "global_steps", "skipped_steps", "lr_scheduler"


def engine_state(checkpoint: Path) -> dict[str, Any]:
    """Return steps and schedule of a checkpoint of DeepSpeed; empty for other checkpoints. Collective.

    Raises:
        CheckpointError: the files of DeepSpeed are damaged or incomplete.
    """
    found: dict[str, Any] = {}
    with on_all_ranks(f"reading {checkpoint}"):
        if dist.get_rank() == 0 and not (checkpoint / MANIFEST_NAME).exists():
            state = read_engine_state(checkpoint)
            found = {key: state.get(key) for key in (_STEPS, _SKIPPED, _SCHEDULE) if state}
    return broadcast_object({key: value for key, value in found.items() if not unsupported_values(value)})


def load_schedule(checkpoint: Path, scheduler: Any, engine: dict[str, Any]) -> None:
    """Load the schedule of the learning rate that DeepSpeed's engine has saved, or set its steps.

    Args:
        scheduler: a scheduler of torch, or that of Accelerate around it.
    """
    saved = engine.get(_SCHEDULE)
    if not isinstance(saved, dict) or "last_epoch" not in saved:
        steps = int(engine.get(_STEPS) or 0) - int(engine.get(_SKIPPED) or 0)
        message = f"has no schedule of torch: that of this run continues after {plural(steps, 'step')}."
        fix = "Compare the learning rate with that of the saved run."
        print_once(problem("FSDP-W415", checkpoint, message, fix))
        saved = scheduler.state_dict() | {"last_epoch": steps, "_step_count": steps + 1}
    scheduler.load_state_dict(saved)


def warn_missing_state(checkpoint: Path) -> None:
    """Report the random states that a checkpoint of DeepSpeed does not contain, or that are of other ranks."""
    world_size = dist.get_world_size()
    files = [path for stem in (TRAINER_RNG, ACCELERATE_RNG) for path in checkpoint.glob(f"{stem}*")]
    if len(files) != world_size:
        saved = f"the random states of {plural(len(files), 'rank')}" if files else "no random states"
        message = f"has {saved}, but this run has {plural(world_size, 'rank')}: dropout and other random operations "
        print_once(problem("FSDP-W415", checkpoint, f"{message}differ from those of the uninterrupted run."))
