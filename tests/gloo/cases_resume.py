"""Cases that ranks run: the same training in any world, mesh, version and type of checkpoint."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from cases_trainer import make_trainer
from transformers import TrainerCallback

from hf_fsdp_plugin.hangs.step_count import step_count
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.runs.restarts import FailedAttempt, Restarts

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
    trainer = make_trainer(
        output_dir,
        callbacks=[stop],
        per_device_train_batch_size=SAMPLES_PER_STEP // dist.get_world_size(),
        save_strategy="steps",
        save_steps=until,
        max_steps=NUM_STEPS,
        **arguments,
    )
    trainer.train(resume_from_checkpoint=resume)
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return {"losses": losses, "step": trainer.state.global_step, "start": stop.start}


def train_in_run(output_dir: str, run_id: str, num_restarts: int, **arguments: Any) -> dict[str, Any]:
    """Train as in a run of the launcher that has been restarted."""
    failures = tuple(FailedAttempt(failure="rank 1: killed by SIGKILL", began=0, steps=6) for _ in range(num_restarts))
    session.restarts, session.num_trainings = Restarts(run_id=run_id, max_restarts=3, failures=failures), 0
    try:
        return train(output_dir, **arguments)
    finally:
        session.restarts, session.num_trainings = Restarts(), 0
        step_count.resume_at(0)
