"""Cases that ranks run: the same training in any world, mesh, version and type of checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from cases_trainer import losses, make_trainer

NUM_STEPS = 14
"""Steps of the whole run. It is interrupted at several steps; ten steps are compared after the last interruption."""
SAMPLES_PER_STEP = 12


def train(
    output_dir: str, *, until: int, resume: bool | str = False, model: str = "llama", **arguments: Any
) -> dict[str, Any]:
    """Train to step ``until`` of a schedule for ``NUM_STEPS``, and save there. All worlds read the same samples."""
    world_size = torch.distributed.get_world_size()
    trainer = make_trainer(
        output_dir,
        model,
        **{
            "per_device_train_batch_size": SAMPLES_PER_STEP // world_size,
            "save_strategy": "steps",
            "save_steps": until,
            "max_steps": NUM_STEPS,
            **arguments,
        },
    )
    if until < NUM_STEPS:
        trainer.add_callback(_stop_at(until))
    trainer.train(resume_from_checkpoint=resume)
    return {
        "losses": {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry},
        "step": trainer.state.global_step,
        "learning_rate": trainer.lr_scheduler.get_last_lr()[0],
        "all": losses(trainer),
    }


def _stop_at(step: int) -> Any:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= step

    return Stop()
