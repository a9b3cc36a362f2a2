"""The functions that the ranks of ``survival.py`` run: train until killed, and resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.bench.common import make_dataset

INTERVAL, LAST_STEP = 2, 40
"""Steps between two saves, and the maximum number of steps, which no run reaches."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The FSDP version, state dict type and mode of the saves of a trial."""

    version: int
    kind: str
    asynchronous: bool

    def __str__(self) -> str:
        return f"FSDP{self.version} {self.kind.lower()} {'asynchronous' if self.asynchronous else 'synchronous'}"


def make_trainer(model: Any, run: Path, setting: Setting, callback: Any, **arguments: Any) -> Any:
    import hf_fsdp_plugin as hfp

    args = hfp.FsdpTrainingArguments(
        output_dir=str(run), max_steps=LAST_STEP, per_device_train_batch_size=1, learning_rate=1e-3, logging_steps=1,
        report_to="none", disable_tqdm=True, use_cpu=True, seed=3, save_strategy="steps", save_steps=INTERVAL,
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "fsdp_version": setting.version, "state_dict_type": setting.kind, "async_save": setting.asynchronous,
        },
        **arguments,
    )  # fmt: skip
    return hfp.FsdpTrainer(
        model=model, args=args, train_dataset=make_dataset(vocab_size=8192, length=16), callbacks=[callback]
    )


def train(rank: int, report: Callable[..., None], model: Any, run: Path, setting: Setting, **arguments: Any) -> None:
    """Train until killed. Report each step, and the start, the hand-over to the background and the end of a save."""
    from transformers import TrainerCallback

    from hf_fsdp_plugin.checkpoint.writing.manager import Save
    from hf_fsdp_plugin.checkpoint.writing.staging_folder import StagingFolder

    def step_of(path: Path) -> int:
        return int(path.name.rpartition("-")[2])

    def reporting(event: str, method: Callable[..., Any], final: Callable[..., Path], *, before: bool) -> Any:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if before:
                report(event, step_of(final(self, *args)))
            result = method(self, *args, **kwargs)
            if not before:
                report(event, step_of(final(self, *args)))
            return result

        return wrapper

    def final(saved: Any, *_: Any) -> Path:
        return saved.final

    StagingFolder.create = reporting("began", StagingFolder.create, final, before=True)  # type: ignore[method-assign]
    StagingFolder.commit = reporting("done", StagingFolder.commit, final, before=False)  # type: ignore[method-assign]
    Save.start = reporting("handed over", Save.start, final, before=False)  # type: ignore[method-assign]
    Save.finish = reporting("handed over", Save.finish, final, before=False)  # type: ignore[method-assign]

    class ReportSteps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            report("step", state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in (logs or {}):
                report("loss", [state.global_step, logs["loss"]])

    make_trainer(model, run, setting, ReportSteps(), **arguments).train()


def resume(rank: int, report: Callable[..., None], model: Any, run: Path, setting: Setting) -> None:
    """Resume from the newest complete checkpoint, train one step, and report the verification and leftover files."""
    import torch.distributed as dist
    from transformers import TrainerCallback

    from hf_fsdp_plugin.tools.verify.verification import verify

    class OneStep(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.start = state.global_step
            report("resumed", state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = True
            control.should_save = False

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in (logs or {}):
                report("loss", [state.global_step, logs["loss"]])

    one_step = OneStep()
    make_trainer(model, run, setting, one_step).train(resume_from_checkpoint=True)
    dist.barrier()
    if rank == 0:
        verdict = verify(run / f"checkpoint-{one_step.start}")
        left = [path.name for path in run.iterdir() if path.name.startswith(".")]
        report("verdict", {"problems": [str(problem) for problem in verdict.problems], "left": sorted(left)})
