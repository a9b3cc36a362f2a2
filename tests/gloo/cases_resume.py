"""Cases that ranks run: the same training in any world, mesh, version and type of checkpoint."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import TrainerCallback, get_scheduler

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.checkpoint.checking.verify import verify
from hf_fsdp_plugin.hangs.calls import record
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.messages import printer
from hf_fsdp_plugin.problems import CheckpointError
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


def resume_without(
    output_dir: str, lost: tuple[str, ...], only_model: tuple[bool, bool], *, manifest: bool = True, **arguments: Any
) -> dict[str, Any]:
    """Train to step 2, remove files of its checkpoint, and resume. Returns losses, messages and the error."""
    first, second = ({"save_only_model": each, "save_strategy": "steps", "save_steps": 2} for each in only_model)
    make_trainer(output_dir, max_steps=2, **first, **arguments).train()
    checkpoint = Path(output_dir) / "checkpoint-2"
    if dist.get_rank() == 0:
        for path in [path for pattern in lost for path in checkpoint.glob(pattern)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not manifest:
            (checkpoint / "fsdp_manifest.json").unlink()
    dist.barrier()
    return _resumed(make_trainer(output_dir, max_steps=3, **second, **arguments), str(checkpoint))


def _resumed(trainer: Any, checkpoint: str | bool) -> dict[str, Any]:
    """Resume. Returns losses, messages and the error."""
    printed: list[str] = []
    printer.listener, error = lambda message: printed.append(str(message)), ""
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except CheckpointError as refusal:
        error = str(refusal)
    finally:
        printer.listener = None
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return {"losses": losses, "printed": "\n".join(printed), "error": error}


def resume_from_unsharded(output_dir: str, **arguments: Any) -> dict[str, Any]:
    """Train to step 3 without FSDP, and resume with it."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    make_trainer(output_dir, **saving).train()
    found = _resumed(make_trainer(output_dir, **arguments), f"{output_dir}/checkpoint-3")
    whole = make_trainer(f"{output_dir}/whole", **arguments)
    whole.train()
    files = sorted(path.name for path in Path(output_dir, "checkpoint-3").iterdir())
    return found | {"whole": [entry["loss"] for entry in whole.state.log_history if "loss" in entry], "files": files}


class OwnCheckpoints(hfp.FsdpTrainer):
    """Writes checkpoints with the body of Transformers' method, shortened, to paths that it computes itself."""

    fails = False

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = f"{self.args.output_dir}/checkpoint-{self.state.global_step}"
        self.save_model(folder, _internal_call=True)
        if self.fails:
            raise ValueError("no space in my store")
        self._save_optimizer_and_scheduler(folder)
        self._save_rng_state(folder)
        if self.args.should_save:
            self.state.save_to_json(f"{folder}/trainer_state.json")
            Path(folder, "notes.txt").write_text("mine")
            Path(self.args.output_dir, "saves.txt").write_text(folder)


class SometimesOwn(hfp.FsdpTrainer):
    """Calls the method of its base class, if it is not the second step."""

    fails = False

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.state.global_step == 2:
            OwnCheckpoints._save_checkpoint(self, model, trial)  # type: ignore[arg-type]
        else:
            super()._save_checkpoint(model, trial)


def own_checkpoints(output_dir: str, kind: str = "OwnCheckpoints", **arguments: Any) -> dict[str, Any]:
    """Train to step 4 with checkpoints that the class writes, resume to step 6, and fail in the save of step 6."""
    cls = {"OwnCheckpoints": OwnCheckpoints, "SometimesOwn": SometimesOwn}[kind]
    arguments["lr_scheduler_type"] = "constant"

    def trainer(max_steps: int) -> Any:
        made = make_trainer(output_dir, max_steps=max_steps, save_strategy="steps", save_steps=2, **arguments)
        made.__class__ = cls
        return made

    printed: list[str] = []
    printer.listener = lambda message: printed.append(str(message))
    try:
        trainer(4).train()
    finally:
        printer.listener = None
    dist.barrier()
    found = sorted(Path(output_dir).glob("checkpoint-*"))
    problems = {path.name: [str(each) for each in verify(path).problems] for path in found}
    resumed, failure = trainer(6), ""
    resumed.fails = True
    try:
        resumed.train(resume_from_checkpoint=True)
    except Exception as error:
        failure = str(error)
    losses = {entry["step"]: entry["loss"] for entry in resumed.state.log_history if "loss" in entry}
    whole = make_trainer(f"{output_dir}/whole", **arguments)
    whole.train()
    dist.barrier()
    return {
        "losses": losses, "failure": failure, "printed": "\n".join(printed), "problems": problems,
        "left": sorted(os.listdir(output_dir)),
        "whole": {entry["step"]: entry["loss"] for entry in whole.state.log_history if "loss" in entry},
        "files": sorted(os.listdir(Path(output_dir, "checkpoint-4"))),
    }  # fmt: skip


class Preempted(TrainerCallback):
    """Is asked for a checkpoint after the third step: both ranks at different moments, or the last one only."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        time.sleep(0.1)
        if state.global_step == 3 and dist.get_rank() in self.ranks:
            time.sleep(0.3 * dist.get_rank())
            os.kill(os.getpid(), signal.SIGTERM)


def preempt(output_dir: str, ranks: tuple[int, ...], **arguments: Any) -> dict[str, Any]:
    """Train with ``enable_jit_checkpoint``, and send SIGTERM to some ranks. Then train to the end."""
    before = signal.getsignal(signal.SIGTERM)
    arguments |= {"max_steps": 60, "enable_jit_checkpoint": True}
    trainer = make_trainer(output_dir, callbacks=[Preempted(ranks)], **arguments)
    trainer.callback_handler.callbacks[_position(trainer)].jit_manager.kill_wait = 0.5
    trainer.train()
    step = trainer.state.global_step
    found = [path.name for path in Path(output_dir).glob("checkpoint-*")]
    resumed = make_trainer(output_dir, callbacks=[StopAt(step + 1)], **arguments)
    resumed.train(resume_from_checkpoint=True)
    return {
        "step": step, "checkpoints": found, "problems": verify(Path(output_dir, found[0])).problems,
        "resumed": resumed.state.global_step, "is_restored": signal.getsignal(signal.SIGTERM) == before,
        "threads": [thread.name for thread in threading.enumerate() if "agreed" in thread.name],
    }  # fmt: skip


def _position(trainer: Any) -> int:
    names = [type(each).__name__ for each in trainer.callback_handler.callbacks]
    return names.index("JITCheckpointCallback")


def rotate_after_copy(output_dir: str, **arguments: Any) -> list[str]:
    """Train to step 3, give the newest checkpoints the oldest dates, and resume to step 4. Returns what is left."""
    arguments |= {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 3}
    make_trainer(output_dir, max_steps=3, **arguments).train()
    if dist.get_rank() == 0:
        for path in Path(output_dir).glob("checkpoint-*"):
            os.utime(path, (10**9 - int(path.name[-1]), 10**9 - int(path.name[-1])))
    dist.barrier()
    make_trainer(output_dir, max_steps=5, **arguments).train(resume_from_checkpoint=True)
    return sorted(path.name for path in Path(output_dir).glob("checkpoint-*"))
