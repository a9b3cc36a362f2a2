"""Cases that ranks run: trainings whose checkpoints are in a storage."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from accelerate.utils import ProjectConfiguration
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.checkpoint.writing import staging_folder
from hf_fsdp_plugin.messages import printer
from tests.support.checkpoint_accelerate_runs import Loop
from tests.support.trainer_runs import losses, make_trainer


def settings(version: int, storage: str, **more: Any) -> dict[str, Any]:
    return {"fsdp": "auto_wrap", "fsdp_config": {"fsdp_version": version, "checkpoint_storage": storage, **more}}


class Start(TrainerCallback):
    """Records the step at which training begins, and asks for a checkpoint after a step."""

    def __init__(self, ask_at: int = 0) -> None:
        self.step, self.ask_at = 0, ask_at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.ask_at:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            Path(args.output_dir, "save_now").touch()
            time.sleep(2)  # the ranks look for a request twice per second, and six steps take less

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step = state.global_step


class OwnPaths(hfp.FsdpTrainer):
    """Computes the paths of its checkpoints itself."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = f"{self.args.output_dir}/checkpoint-{self.state.global_step}"
        self.save_model(folder, _internal_call=True)
        self._save_optimizer_and_scheduler(folder)
        self._save_rng_state(folder)
        if self.args.should_save:
            self.state.save_to_json(f"{folder}/trainer_state.json")


@contextmanager
def messages() -> Iterator[list[str]]:
    """Yield the messages that this rank prints in the block."""
    found: list[str] = []
    with patch.object(printer(), "listener", lambda message: found.append(str(message))):
        yield found


def train(
    output_dir: str,
    variables: Mapping[str, str],
    *,
    resume: bool | str | None = None,
    shared: bool = False,
    ask_at: int = 0,
    **arguments: Any,
) -> dict[str, Any]:
    """Train with a folder for each rank, as on machines without a common file system."""
    folder, start = output_dir if shared else f"{output_dir}/machine{dist.get_rank()}", Start(ask_at)
    options = {"save_strategy": "steps", "save_steps": 2, "callbacks": [start], **arguments}
    with patch.dict(os.environ, variables):
        trainer = make_trainer(folder, **options)
        trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if resume == "last" else resume)
        report = hfp.report(trainer)
    left = sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*"))
    row = next(row for row in report.settings if row["setting"] == "checkpoint.storage")
    return {"losses": losses(trainer), "left": left, "start": start.step, "storage": row["observed"]}


def train_with_faults(output_dir: str, variables: Mapping[str, str], **arguments: Any) -> dict[str, Any]:
    with messages() as found, patch.object(staging_folder.StoredStaging, "poll_interval", 0.1):
        return {**train(output_dir, variables, **arguments), "messages": found}


class Timed(hfp.FsdpTrainer):
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().evaluate(*args, **kwargs), "eval_time": float(self.state.global_step)}


def train_best(output_dir: str, variables: Mapping[str, str], **arguments: Any) -> dict[str, Any]:
    best = {
        "load_best_model_at_end": True, "metric_for_best_model": "time", "greater_is_better": False,
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1,
    }  # fmt: skip
    with patch.dict(os.environ, variables):
        trainer = make_trainer(f"{output_dir}/machine{dist.get_rank()}", trainer_class=Timed, **best, **arguments)
        trainer.train()
        evaluations = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        loss = trainer.evaluate()["eval_loss"]
    return {"best": Path(trainer.state.best_model_checkpoint).name, "loss": loss, "best_loss": evaluations[0]}


def loop(output_dir: str, variables: Mapping[str, str], version: int, storage: str) -> dict[str, Any]:
    """Save three times with automatic names, of which two are kept, and load the newest one."""
    folder = f"{output_dir}/machine{dist.get_rank()}"
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    with patch.dict(os.environ, variables):
        run = Loop(version, project=project, fsdp_checkpoint_storage=storage)
        for number in range(3):
            run.step(number)
            run.accelerator.save_state()
        first = run.step(3)
        run.accelerator.load_state()
        return {"first": first, "again": run.step(3)}
