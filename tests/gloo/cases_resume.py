"""Cases that ranks run: the same training in any world, mesh, version and type of checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import TrainerCallback, get_scheduler

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.hangs.calls import record
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.messages import printer
from hf_fsdp_plugin.runs.restart_policy import FailedAttempt, Restarts
from tests.gloo.cases_trainer import Batches, make_trainer
from tests.support.tiny import MODELS

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


def train_in_run(output_dir: str, run_id: str, num_restarts: int, **arguments: Any) -> dict[str, Any]:
    """Train as in a run of the launcher that has been restarted."""
    with restarted(run_id, num_restarts):
        return train(output_dir, **arguments)


@contextlib.contextmanager
def restarted(run_id: str, num_restarts: int) -> Iterator[list[str]]:
    """Be a rank of a run that has been restarted. Gives the messages of this rank."""
    failures = tuple(FailedAttempt(failure="rank 1: killed by SIGKILL", began=0, steps=6) for _ in range(num_restarts))
    session.restarts, session.num_trainings = Restarts(run_id=run_id, max_restarts=3, failures=failures), 0
    printed: list[str] = []
    printer.listener = lambda message: printed.append(str(message))
    try:
        yield printed
    finally:
        printer.listener = None
        session.restarts, session.num_trainings, session.first_samples_per_step = Restarts(), 0, None
        record.resume_at(0)


def train_loop(folder: str, num_restarts: int, until: int, length: str, accumulation: int, **loop: Any) -> Any:
    """Train in an Accelerate loop with ``accumulate`` to step ``until`` of ``NUM_STEPS``, and save there.

    Args:
        length: how the script computes the length of the schedule: from the ``ranks``, the ``batches`` of all ranks, or
            as ``T_max`` of a scheduler of torch.
    """
    with restarted("loop", num_restarts) as printed:
        return {**_loop(Path(folder), until, length, accumulation, **loop), "printed": printed}


def _loop(folder: Path, until: int, length: str, accumulation: int, version: int, uses_accumulate: bool = True) -> Any:
    torch.manual_seed(0)
    accelerator = hfp.accelerator(
        hfp.load_spec(fsdp="auto_wrap", fsdp_config={"fsdp_version": version}),
        gradient_accumulation_steps=accumulation,
    )
    model = MODELS["llama"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Batches(6), batch_size=1)
    num_steps = NUM_STEPS * (4 if length == "batches" else dist.get_world_size())
    if length == "torch":
        scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    else:
        scheduler = get_scheduler("cosine", optimizer, num_steps // 7, num_steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    step, losses, rates = 0, {}, {}
    if (checkpoint := hfp.newest_checkpoint(folder, this_run=True)) is not None:
        accelerator.load_state(checkpoint)
        step = int(checkpoint.name.removeprefix("step-"))
    num_micro = accelerator.gradient_accumulation_steps
    steps_per_epoch = len(loader) // num_micro
    while step < until:
        done = step % steps_per_epoch * num_micro
        micro_losses = []
        for batch in accelerator.skip_first_batches(loader, done) if done else loader:
            with accelerator.accumulate(model) if uses_accumulate else contextlib.nullcontext():
                loss = model(**batch).loss
                micro_losses.append(loss.detach())
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            losses[step] = accelerator.reduce(torch.stack(micro_losses).mean(), reduction="mean").item()
            rates[step] = scheduler.get_last_lr()[0]
            micro_losses.clear()
            if step == until:
                break
    accelerator.save_state(folder / f"step-{step}")
    samples = hfp.report(accelerator).effective_batch_size
    return {"losses": losses, "rates": rates, "accumulation": num_micro, "samples": samples}
