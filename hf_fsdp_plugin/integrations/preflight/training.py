"""Replacement of the training of the Trainer: the stages of a preflight are recorded while the training runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final, NoReturn

from transformers.trainer_callback import TrainerCallback

from hf_fsdp_plugin.backends.shard import plan_of
from hf_fsdp_plugin.checkpoint.names import TRAINER_PREFIX
from hf_fsdp_plugin.integrations.preflight.after_training import AfterTraining, run_calls
from hf_fsdp_plugin.integrations.preflight.arguments import note_change
from hf_fsdp_plugin.integrations.preflight.clone import MAX_PARAMS, num_params_of
from hf_fsdp_plugin.integrations.preflight.comparison import Trained, check_export, compare_runs
from hf_fsdp_plugin.integrations.preflight.loading import first_samples
from hf_fsdp_plugin.integrations.preflight.run import preflight
from hf_fsdp_plugin.integrations.preflight.stages import REPORT_FILE
from hf_fsdp_plugin.integrations.profiling.marking import marks
from hf_fsdp_plugin.integrations.run_report import report_run
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.integrations.transformers.private import save_checkpoint, untrained_copy
from hf_fsdp_plugin.observe.profile.marks import Phase
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_count

SAVED_STEP: Final = 1
"""The step after which a checkpoint is written, from which the second run continues."""
LAST_STEP: Final = 2
_NUM_EVALUATED: Final = 8
_STAGES_OF_PHASES: Final[dict[Phase, str]] = {"clipping": "clip", "checkpoint": "save"}


class PreflightEnd(SystemExit):
    """Ends the script after its training, because what follows may write to the folders of the user.

    Calls of the Trainer that follow are made by :mod:`.after_training`.
    """

    def __init__(self) -> None:
        super().__init__(0)


class StageCallback(TrainerCallback):
    """Records stages and results. It is the last callback, so it decides when a run evaluates, saves and stops."""

    def __init__(self, trained: Trained, *, is_first: bool) -> None:
        self._trained, self._is_first = trained, is_first
        self._strategies = ("no", "no")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._strategies = (_text(args.eval_strategy), _text(args.save_strategy))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._enter("step")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._enter("update")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trained.capture(state.global_step)
        self._control(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._control(state, control, is_epoch_end=True)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if "loss" in logs:
            self._trained.logs[state.global_step] = dict(logs)
            if control.should_evaluate:  # the Trainer evaluates, and saves, right after it has logged the loss
                self._enter("evaluate")
            elif control.should_save:
                self._enter("save")
        if "train_runtime" in logs and args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._enter("load best")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._enter("step")

    def _enter(self, stage: Any) -> None:
        if self._is_first:
            preflight.recorder.enter(stage)

    def _control(self, state: Any, control: Any, *, is_epoch_end: bool = False) -> None:
        evaluates, saves = (strategy != "no" for strategy in self._strategies)
        at_saved_step = self._is_first and state.global_step == SAVED_STEP and not is_epoch_end
        control.should_log = not is_epoch_end
        control.should_evaluate = at_saved_step and evaluates
        control.should_save = at_saved_step and saves
        control.should_training_stop |= state.global_step >= LAST_STEP


def inner_training_loop(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run two steps, resume from the checkpoint of the first one with a fresh model, and export the checkpoint."""
    if not preflight.active or preflight.phase != "script":
        return original(*args, **kwargs)
    _FirstRun(trainer).run(original, *args, **kwargs)


class _FirstRun:
    def __init__(self, trainer: Any) -> None:
        self.trainer, self.recorder = trainer, preflight.recorder
        self.trained = Trained(trainer)
        self.fresh: Any = None
        self.after = AfterTraining(trainer, _NUM_EVALUATED * preflight.world_size)

    def run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> NoReturn:
        trainer, recorder = self.trainer, self.recorder
        _check_size(trainer)
        _limit_evaluation(trainer)
        if kwargs.get("resume_from_checkpoint") is not None:
            note_change("the training begins anew instead of resuming from the given checkpoint")
            kwargs["resume_from_checkpoint"] = None
        self._copy_for_second_run()
        preflight.phase = "first run"
        marks.stage_of = _stage_of
        callback = StageCallback(self.trained, is_first=True)
        trainer.add_callback(callback)
        recorder.enter("prepare")
        try:
            original(*args, **kwargs)
            manager.wait()
            recorder.leave()
            _note_report(trainer)
        except Exception as error:
            self._failed(error)
        trainer.remove_callback(callback)
        self._further_stages()
        preflight.phase = "after it"
        raise PreflightEnd

    def _copy_for_second_run(self) -> None:
        if plan_of(self.trainer.model) is not None:
            self.recorder.skip("resume", "the script has prepared the model before the training")
            return
        try:
            self.fresh = untrained_copy(self.trainer)
        except Exception as error:
            self.recorder.skip("resume", f"the Trainer cannot be copied: {type(error).__name__}: {error}")

    def _failed(self, error: Exception) -> None:
        preflight.failed(error)
        if not preflight.wait_for_same_failure():
            raise error

    def _further_stages(self) -> None:
        """Run the stages that a failure has skipped, and those after the training."""
        trainer, recorder, args = self.trainer, self.recorder, self.trainer.args
        if "update" in recorder.done:
            recorder.skip("clip", "the Trainer does not clip gradients with the Accelerator")
        is_prepared = "prepare" in recorder.done
        if is_prepared and _text(args.eval_strategy) != "no":
            self._try("evaluate", trainer.evaluate)
        if is_prepared and _text(args.save_strategy) != "no":
            self._try("save", lambda: save_checkpoint(trainer))
        for stage, setting in (("evaluate", "eval_strategy"), ("save", "save_strategy")):
            if _text(getattr(args, setting)) == "no":
                recorder.skip(stage, f"{setting} is no")
        if not args.load_best_model_at_end:
            recorder.skip("load best", "load_best_model_at_end is not set")
        checkpoint = Path(args.output_dir) / f"{TRAINER_PREFIX}{SAVED_STEP}"
        if "save" in recorder.done and checkpoint.is_dir():
            if self.fresh is not None and not args.save_only_model:
                self._try("resume", lambda: self._resume(checkpoint))
            elif args.save_only_model:
                recorder.skip("resume", "save_only_model is set, so these checkpoints cannot be resumed")
            self._try("export", lambda: check_export(self.trained, checkpoint, SAVED_STEP))
        elif is_prepared and _text(args.save_strategy) == "no":
            recorder.skip("resume", "save_strategy is no")
            self._try("export", self._export_model)
        if {"prepare", "update"} <= recorder.done:
            run_calls(self.after, self._try)

    def _export_model(self) -> None:
        folder = preflight.folder / "exported"
        self.trainer.save_model(str(folder))
        check_export(self.trained, folder, self.trainer.state.global_step)

    def _try(self, stage: Any, run: Callable[[], Any]) -> None:
        if stage in self.recorder.done or self.recorder.has_failed(stage):
            return
        self.recorder.enter(stage)
        preflight.phase = "second run"  # the hooks record no stages inside this one
        try:
            run()
            self.recorder.leave()
        except Exception as error:
            self._failed(error)
        preflight.phase = "first run"

    def _resume(self, checkpoint: Path) -> None:
        fresh = self.fresh
        fresh.create_accelerator_and_postprocess()
        resumed = Trained(fresh)
        fresh.add_callback(StageCallback(resumed, is_first=False))
        fresh.args.load_best_model_at_end = False
        fresh.train(resume_from_checkpoint=str(checkpoint))
        compare_runs(self.trained, resumed, LAST_STEP)


def _note_report(trainer: Any) -> None:
    """Record the problems in the report of the run: settings that differ from the plan, for example. Collective."""
    report_run(trainer.accelerator)
    file = preflight.folder / REPORT_FILE
    if preflight.rank == 0 and file.is_file():
        for problem in json.loads(file.read_text())["problems"]:
            if problem["severity"] != "note":
                fields = {name: problem[name] for name in ("code", "message", "fix", "setting")}
                preflight.recorder.note(Problem(**fields))


def _stage_of(phase: Phase) -> AbstractContextManager[None]:
    """Return the stage of a call that this package replaces for every run. Only the first run records stages."""
    stage = _STAGES_OF_PHASES.get(phase)
    records = preflight.active and preflight.phase == "first run"
    return preflight.stage(stage) if stage is not None and records else nullcontext()


def _text(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy))


def _check_size(trainer: Any) -> None:
    """Refuse a model that the script builds itself, without ``from_pretrained`` or ``from_config``, if it is large."""
    num_params = num_params_of(trainer.model)
    if num_params > MAX_PARAMS:
        message = f"{type(trainer.model).__name__} has {format_count(num_params)} parameters, and is not replaced by a "
        message += "clone, because the script builds it with its constructor."
        fix = "Build it with from_pretrained or from_config of an Auto class, or pass --model instead of the script."
        raise SpecError([Problem(code="FSDP-E752", message=message, fix=fix)])


def _limit_evaluation(trainer: Any) -> None:
    number = _NUM_EVALUATED * preflight.world_size
    data = trainer.eval_dataset
    if isinstance(data, dict) and not hasattr(data, "take"):
        trainer.eval_dataset = {name: first_samples(each, number) for name, each in data.items()}
    elif data is not None:
        trainer.eval_dataset = first_samples(data, number)
