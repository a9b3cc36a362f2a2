"""Cases that ranks run: the same training in any world, mesh, version and type of checkpoint."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

import hf_fsdp_plugin as hfp
from tests.support.trainer_runs import make_trainer

NUM_STEPS = 14
"""Steps of the whole run. It is interrupted at several steps; ten steps are compared after the last interruption."""
SAMPLES_PER_STEP = 12


class StopAt(TrainerCallback):
    """Ends training at the end of a step, or of the first step after it."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.start = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.start = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def train(output_dir: str, *, until: int, resume: bool = False, **arguments: Any) -> dict[str, Any]:
    """Train to step ``until`` of a schedule for ``NUM_STEPS``, and save there. All worlds read the same samples."""
    stop = StopAt(until)
    defaults = {"per_device_train_batch_size": SAMPLES_PER_STEP // dist.get_world_size(), "max_steps": NUM_STEPS}
    trainer = make_trainer(
        output_dir, callbacks=[stop], save_strategy="steps", save_steps=until, **{**defaults, **arguments}
    )
    trainer.train(resume_from_checkpoint=resume)
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    rates = {entry["step"]: entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry}
    return {
        "losses": losses,
        "rates": rates,
        "step": trainer.state.global_step,
        "start": stop.start,
        "epoch": trainer.state.epoch,
        "accumulation": trainer.args.gradient_accumulation_steps,
        "samples": hfp.report(trainer).effective_batch_size,
    }
