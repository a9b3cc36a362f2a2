"""The training of a preflight: of the Trainer, and of a script with its own loop and an ``Accelerator``.

The stages are recorded while a few steps run. The stages that follow them run after the last step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from transformers.trainer_callback import TrainerCallback

from hf_fsdp_plugin.backends.sharding.shard import plan_of
from hf_fsdp_plugin.checkpoint.names import TRAINER_PREFIX
from hf_fsdp_plugin.integrations.accelerate.private import prepared_models
from hf_fsdp_plugin.integrations.preflight.clone import MAX_PARAMS, num_params_of
from hf_fsdp_plugin.integrations.preflight.comparison import Weights, check_export, compare_runs, whole_weights
from hf_fsdp_plugin.integrations.preflight.replacements import first_samples
from hf_fsdp_plugin.integrations.preflight.run import note_change, preflight
from hf_fsdp_plugin.integrations.preflight.stages import REPORT_FILE
from hf_fsdp_plugin.integrations.profiling.marking import marks
from hf_fsdp_plugin.integrations.run_report import report_run
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.integrations.transformers.private import save_checkpoint, untrained_copy
from hf_fsdp_plugin.observe.profile.trace import Phase
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_count

SAVED_STEP: Final = 1
"""The step after which a checkpoint is written, from which the second run continues."""
LAST_STEP: Final = 3
"""The first step whose learning rate a resumed scheduler computes: the optimizer stores the learning rate of step 2."""
_NUM_STEPS_OF_LOOP: Final = 2
_NUM_EVALUATED: Final = 8
_STAGES_OF_PHASES: Final[dict[Phase, str]] = {"clipping": "clip", "checkpoint": "save"}


class PreflightEnd(SystemExit):
    """Ends the script after its training, because what follows may write to the folders of the user."""

    def __init__(self) -> None:
        super().__init__(0)


class StageCallback(TrainerCallback):
    """Records stages and weights. It is the last callback, so it decides when a run evaluates, saves and stops.

    Args:
        evaluates, saves: whether the arguments of the user do.

    Attributes:
        weights: step -> weights after it.
    """

    def __init__(self, trainer: Any, *, is_first: bool, evaluates: bool = False, saves: bool = False) -> None:
        self._trainer, self._is_first = trainer, is_first
        self._evaluates, self._saves = evaluates, saves
        self.weights: dict[int, Weights] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._enter("step")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._enter("update")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights[state.global_step] = whole_weights(self._trainer.accelerator, self._trainer.model)
        self._control(state, control, is_saved_step=self._is_first and state.global_step == SAVED_STEP)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._control(state, control, is_saved_step=False)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if "loss" in logs:
            if control.should_evaluate:  # the Trainer evaluates, and saves, right after it has logged the loss
                self._enter("evaluate")
            elif control.should_save:
                self._enter("save")
        if "train_runtime" in logs and args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._enter("load best")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._enter("step")

    def _enter(self, stage: str) -> None:
        if self._is_first:
            preflight.recorder.enter(stage)

    def _control(self, state: Any, control: Any, *, is_saved_step: bool) -> None:
        control.should_log = is_saved_step
        control.should_evaluate = is_saved_step and self._evaluates
        control.should_save = is_saved_step and self._saves
        control.should_training_stop |= state.global_step >= LAST_STEP


def inner_training_loop(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run three steps, resume from the checkpoint of the first one with a fresh model, and export the checkpoint."""
    if not preflight.is_in_script:
        return original(*args, **kwargs)
    _FirstRun(trainer).run(original, *args, **kwargs)


class _FirstRun:
    def __init__(self, trainer: Any) -> None:
        self.trainer, self.recorder = trainer, preflight.recorder
        self.evaluates, self.saves = _is_on(trainer.args.eval_strategy), _is_on(trainer.args.save_strategy)
        self.callback = StageCallback(trainer, is_first=True, evaluates=self.evaluates, saves=self.saves)

    def run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> NoReturn:
        trainer, recorder = self.trainer, self.recorder
        _check_size(trainer)
        trainer.eval_dataset = first_samples(trainer.eval_dataset, _NUM_EVALUATED * preflight.world_size)
        if kwargs.get("resume_from_checkpoint") is not None:
            note_change("the training begins anew instead of resuming from the given checkpoint")
            kwargs["resume_from_checkpoint"] = None
        fresh = self._copy_for_second_run()
        preflight.phase = "first run"
        marks.stage_of = _stage_of
        trainer.add_callback(self.callback)

        def train() -> None:
            original(*args, **kwargs)
            manager.wait()
            recorder.leave()
            _note_report(trainer)

        preflight.attempt("prepare", train)
        trainer.remove_callback(self.callback)
        preflight.phase = "second run"  # the hooks record no stages in what follows
        self._further_stages(fresh)
        preflight.phase = "after it"
        raise PreflightEnd

    def _copy_for_second_run(self) -> Any:
        """Return a copy of the Trainer before its training; ``None`` if it cannot be copied."""
        if plan_of(self.trainer.model) is not None:
            self.recorder.skip("resume", "the script has prepared the model before the training")
            return None
        try:
            return untrained_copy(self.trainer)
        except Exception as error:
            self.recorder.skip("resume", f"the Trainer cannot be copied: {type(error).__name__}: {error}")
            return None

    def _further_stages(self, fresh: Any) -> None:
        """Run the stages that a failure has skipped, and those after the training."""
        trainer, recorder, args = self.trainer, self.recorder, self.trainer.args
        checkpoint = Path(args.output_dir) / f"{TRAINER_PREFIX}{SAVED_STEP}"
        if "update" in recorder.done:
            recorder.skip("clip", "the Trainer does not clip gradients with the Accelerator")
        if not self.evaluates:
            recorder.skip("evaluate", "eval_strategy is no")
        if not self.saves:
            recorder.skip("save", "save_strategy is no")
            recorder.skip("resume", "save_strategy is no")
        if not args.load_best_model_at_end:
            recorder.skip("load best", "load_best_model_at_end is not set")
        if args.save_only_model:
            recorder.skip("resume", "save_only_model is set, so these checkpoints cannot be resumed")
        if "prepare" not in recorder.done:
            return
        self._try("evaluate", trainer.evaluate)
        self._try("save", lambda: save_checkpoint(trainer))
        if "save" in recorder.done and checkpoint.is_dir():
            self._try("resume", lambda: self._resume(fresh, checkpoint))
            self._try("export", lambda: self._check_export(checkpoint, SAVED_STEP))
        elif not self.saves:
            self._try("export", self._export_model)

    def _export_model(self) -> None:
        folder = preflight.folder / "exported"
        self.trainer.save_model(str(folder))
        self._check_export(folder, self.trainer.state.global_step)

    def _check_export(self, folder: Path, step: int) -> None:
        check_export(self.trainer.model, self.callback.weights.get(step, {}), folder)

    def _try(self, stage: str, run: Callable[[], Any]) -> None:
        """Run a stage, unless it has passed, has failed or is not tested."""
        if stage not in self.recorder.done and not self.recorder.has_failed(stage):
            preflight.attempt(stage, run)

    def _resume(self, fresh: Any, checkpoint: Path) -> None:
        fresh.create_accelerator_and_postprocess()
        callback = StageCallback(fresh, is_first=False)
        fresh.add_callback(callback)
        fresh.args.load_best_model_at_end = False
        fresh.train(resume_from_checkpoint=str(checkpoint))
        if LAST_STEP in self.callback.weights:  # else the first run has failed before
            compare_runs(self.callback.weights[LAST_STEP], callback.weights.get(LAST_STEP, {}))


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


def _is_on(strategy: Any) -> bool:
    """Return whether ``eval_strategy`` or ``save_strategy`` is not ``no``."""
    return bool(strategy != "no")


def _check_size(trainer: Any) -> None:
    """Refuse a model that the script builds itself, without ``from_pretrained`` or ``from_config``, if it is large."""
    num_params = num_params_of(trainer.model)
    if num_params > MAX_PARAMS:
        message = f"{type(trainer.model).__name__} has {format_count(num_params)} parameters, and is not replaced by a "
        message += "clone, because the script builds it with its constructor."
        fix = "Build it with from_pretrained or from_config of an Auto class, or pass --model instead of the script."
        raise SpecError([Problem(code="FSDP-E752", message=message, fix=fix)])


class OwnLoop:
    """The steps of a script with its own loop. A Trainer prepares its model in a run of its own."""

    def __init__(self) -> None:
        self._accelerator: Any = None
        self._num_steps = 0

    def watch_model(self, accelerator: Any) -> None:
        """Record the stage ``prepare`` of a sharded model. The sharding itself is part of the stage before."""
        self._accelerator = accelerator
        if preflight.is_in_script:
            preflight.recorder.enter("prepare")

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the stages after a prepared optimizer, and end the script after the last step."""
        if preflight.is_in_script:
            preflight.recorder.enter("step")
        optimizer.register_step_pre_hook(self._begin_update)
        optimizer.register_step_post_hook(self._end_update)

    def _begin_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # torch creates the state of an optimizer, for a checkpoint, with a step whose learning rate is 0. It is no step
        # of the script.
        if preflight.is_in_script and any(group["lr"] for group in optimizer.param_groups):
            preflight.recorder.enter("update")

    def _end_update(self, *_: Any) -> None:
        """Count a step. After the last one, run the further stages and end the script."""
        if not preflight.is_in_script or preflight.recorder.current != "update":
            return
        preflight.recorder.enter("step")
        if self._accelerator is None or not self._accelerator.sync_gradients:
            return
        self._num_steps += 1
        if self._num_steps == _NUM_STEPS_OF_LOOP:
            preflight.phase = "after it"
            preflight.recorder.leave()
            _stages_after_loop(self._accelerator)
            raise PreflightEnd


def _stages_after_loop(accelerator: Any) -> None:
    recorder, folder = preflight.recorder, preflight.folder / "out" / "checkpoint_0"
    models = prepared_models(accelerator)
    model = models[0]
    trained: dict[str, torch.Tensor] = {}
    for stage in ("clip", "evaluate", "load best"):
        recorder.skip(stage, "the script has its own loop")

    def save() -> None:
        trained.update(whole_weights(accelerator, model))
        accelerator.save_state(str(folder))
        manager.wait()

    def load() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        accelerator.load_state(str(folder))
        compare_runs(trained, whole_weights(accelerator, model))

    def export() -> None:
        if len(models) > 1:
            recorder.skip_current("the script has prepared several models")
        else:
            check_export(model, trained, folder)

    for stage, run in (("save", save), ("resume", load), ("export", export)):
        if not preflight.attempt(stage, run):
            return


own_loop = OwnLoop()
"""The loop of this process."""
