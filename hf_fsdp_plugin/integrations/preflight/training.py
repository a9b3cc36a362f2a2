"""The training of a preflight: of the Trainer, and of a script with its own loop and an ``Accelerator``.

The stages are recorded while a few steps run. The stages that follow them run after the last step: a second run
continues from the checkpoint, and the checkpoint is exported. Both must have the weights of the first run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from transformers.trainer_callback import TrainerCallback

from hf_fsdp_plugin.backends.ranks.agreement import broadcast_object
from hf_fsdp_plugin.backends.sharding.shard import plan_of
from hf_fsdp_plugin.checkpoint.merging.merge import MergeOptions, merge
from hf_fsdp_plugin.checkpoint.names import HF_MODEL, TRAINER_PREFIX, safetensors_file
from hf_fsdp_plugin.integrations.accelerate.private import prepared_models
from hf_fsdp_plugin.integrations.preflight.clone import MAX_PARAMS, num_params_of
from hf_fsdp_plugin.integrations.preflight.replacements import first_samples
from hf_fsdp_plugin.integrations.preflight.stages import REPORT_FILE, preflight, problems_of_error
from hf_fsdp_plugin.integrations.profiling.run import marks
from hf_fsdp_plugin.integrations.run_report import report_run
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.integrations.transformers.private import save_checkpoint, untrained_copy
from hf_fsdp_plugin.observe.profile.rank_profile import Phase
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_count, format_names

SAVED_STEP: Final = 1
"""The step after which a checkpoint is written, from which the second run continues."""
LAST_STEP: Final = 3
"""The first step whose learning rate a resumed scheduler computes: the optimizer stores the learning rate of step 2."""
_NUM_STEPS_OF_LOOP: Final = 2
_NUM_EVALUATED: Final = 8
_TOLERANCE: Final = 1e-5
"""Largest relative difference of weights after resuming. On the CPU they are usually equal."""
_ADAPTER_TOLERANCE: Final = 1e-2
_ADAPTER: Final = ".default"
_ADAPTER_FILE: Final = "adapter_model.safetensors"

Weights = Mapping[str, torch.Tensor]


class StageCallback(TrainerCallback):
    """Records the stages of the first run, and the weights of each step.

    It is the last callback, so it decides when a run evaluates, saves and stops.

    Attributes:
        weights: step -> weights after it.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._is_first = preflight.phase == "first run"
        self._records_steps = self._is_first and preflight.options.records_steps
        self.weights: dict[int, Weights] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._enter("step")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._enter("update")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights[state.global_step] = whole_weights(self._trainer.accelerator, self._trainer.model)
        self._control(args, state, control, is_saved_step=self._is_first and state.global_step == SAVED_STEP)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._control(args, state, control, is_saved_step=False)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        if "loss" in logs and self._records_steps:
            preflight.record.steps.append({name: float(logs[name]) for name in ("loss", "grad_norm") if name in logs})
        if "loss" in logs and control.should_evaluate:  # the Trainer evaluates right after it has logged the loss
            self._enter("evaluate")
        if "train_runtime" in logs and args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._enter("load best")

    def _enter(self, stage: str) -> None:
        if self._is_first:
            preflight.enter(stage)

    def _control(self, args: Any, state: Any, control: Any, *, is_saved_step: bool) -> None:
        control.should_log = is_saved_step or self._records_steps
        control.should_evaluate = is_saved_step and args.eval_strategy != "no"
        control.should_save = is_saved_step and args.save_strategy != "no"
        control.should_training_stop |= state.global_step >= LAST_STEP


def inner_training_loop(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run three steps, resume from the checkpoint of the first one with a fresh model, and export the checkpoint.

    Ends the script then, because what follows may write to the folders of the user.

    Raises:
        SpecError: the script builds a large model itself, without ``from_pretrained`` or ``from_config``.
    """
    if not preflight.is_in_script:
        return original(*args, **kwargs)
    num_params = num_params_of(trainer.model)
    if num_params > MAX_PARAMS:
        message = f"{type(trainer.model).__name__} has {format_count(num_params)} parameters, and is not replaced by a "
        message += "clone, because the script builds it with its constructor."
        fix = "Build it with from_pretrained or from_config of an Auto class, or pass --model instead of the script."
        raise SpecError([Problem(code="FSDP-E752", message=message, fix=fix)])
    trainer.eval_dataset = first_samples(trainer.eval_dataset, _NUM_EVALUATED * preflight.world_size)
    if kwargs.get("resume_from_checkpoint") is not None:
        preflight.note_change("the training begins anew instead of resuming from the given checkpoint")
        kwargs["resume_from_checkpoint"] = None
    fresh = None
    if plan_of(trainer.model) is not None:
        preflight.skip("resume", "the script has prepared the model before the training")
    else:
        try:
            fresh = untrained_copy(trainer)
        except Exception as error:
            preflight.skip("resume", f"the Trainer cannot be copied: {type(error).__name__}: {error}")
    preflight.phase = "first run"
    marks.stage_of = _stage_of
    callback = StageCallback(trainer)
    trainer.add_callback(callback)

    def train() -> None:
        original(*args, **kwargs)
        manager.wait()
        preflight.enter(None)
        report_run(trainer.accelerator)
        file = preflight.folder / REPORT_FILE
        if preflight.rank == 0 and file.is_file():  # settings that differ from the plan, for example
            for problem in json.loads(file.read_text())["problems"]:
                if problem["severity"] != "note":
                    preflight.note(Problem(**{name: problem[name] for name in ("code", "message", "fix", "setting")}))

    preflight.attempt("prepare", train)
    trainer.remove_callback(callback)
    preflight.phase = "afterwards"  # the hooks record no stages in what follows
    no_saves = trainer.args.save_strategy == "no"
    for stage, is_skipped, reason in (
        ("clip", preflight.has_passed("update"), "the Trainer does not clip gradients with the Accelerator"),
        ("evaluate", trainer.args.eval_strategy == "no", "eval_strategy is no"),
        ("save", no_saves, "save_strategy is no"),
        ("load best", not trainer.args.load_best_model_at_end, "load_best_model_at_end is not set"),
        ("resume", no_saves, "save_strategy is no"),
        ("resume", trainer.args.save_only_model, "save_only_model is set, so these checkpoints cannot be resumed"),
    ):
        if is_skipped:
            preflight.skip(stage, reason)
    if preflight.has_passed("prepare"):
        _further_stages(trainer, fresh, callback.weights)
    raise SystemExit(0)


def _stage_of(phase: Phase) -> AbstractContextManager[None]:
    """Return the stage of a call that this package replaces for every run. Only the first run records stages."""
    stage = {"clipping": "clip", "checkpoint": "save"}.get(phase)
    records = preflight.active and preflight.phase == "first run"
    return preflight.stage(stage) if stage is not None and records else nullcontext()


def _further_stages(trainer: Any, fresh: Any, weights: Mapping[int, Weights]) -> None:
    """Run the stages that a failure has skipped, and those after the training.

    Args:
        fresh: the Trainer of the second run.
        weights: step -> weights of the first run after it.
    """
    checkpoint = Path(trainer.args.output_dir) / f"{TRAINER_PREFIX}{SAVED_STEP}"

    def attempt(stage: str, run: Callable[[], Any]) -> None:
        if not preflight.is_over(stage):
            preflight.attempt(stage, run)

    def resume() -> None:
        fresh.create_accelerator_and_postprocess()
        callback = StageCallback(fresh)
        fresh.add_callback(callback)
        fresh.args.load_best_model_at_end = False
        fresh.train(resume_from_checkpoint=str(checkpoint))
        if LAST_STEP in weights:  # else the first run has failed before
            compare_runs(weights[LAST_STEP], callback.weights.get(LAST_STEP, {}))

    def export_model() -> None:
        folder = preflight.folder / "exported"
        trainer.save_model(str(folder))
        check_export(trainer.model, weights.get(trainer.state.global_step, {}), folder)

    attempt("evaluate", trainer.evaluate)
    attempt("save", lambda: save_checkpoint(trainer))
    if preflight.has_passed("save") and checkpoint.is_dir():
        attempt("resume", resume)
        attempt("export", lambda: check_export(trainer.model, weights.get(SAVED_STEP, {}), checkpoint))
    elif trainer.args.save_strategy == "no":
        attempt("export", export_model)


class OwnLoop:
    """The steps of a script with its own loop. A Trainer prepares its model in a run of its own."""

    def __init__(self) -> None:
        self._accelerator: Any = None
        self._num_steps = 0

    def watch_model(self, accelerator: Any) -> None:
        """Record the stage ``prepare`` of a sharded model. The sharding itself is part of the stage before."""
        self._accelerator = accelerator
        if preflight.is_in_script:
            preflight.enter("prepare")

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the stages after a prepared optimizer, and end the script after the last step."""
        if preflight.is_in_script:
            preflight.enter("step")
        optimizer.register_step_pre_hook(self._begin_update)
        optimizer.register_step_post_hook(self._end_update)

    def _begin_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # torch creates the state of an optimizer, for a checkpoint, with a step whose learning rate is 0. It is no step
        # of the script.
        if preflight.is_in_script and any(group["lr"] for group in optimizer.param_groups):
            preflight.enter("update")

    def _end_update(self, *_: Any) -> None:
        """Count a step. After the last one, run the further stages and end the script."""
        if not preflight.is_in_script or preflight.record.running != "update":
            return
        preflight.enter("step")
        if self._accelerator is None or not self._accelerator.sync_gradients:
            return
        self._num_steps += 1
        if self._num_steps == _NUM_STEPS_OF_LOOP:
            preflight.phase = "afterwards"
            preflight.enter(None)
            self._further_stages()
            raise SystemExit(0)

    def _further_stages(self) -> None:
        accelerator, folder = self._accelerator, preflight.folder / "out" / "checkpoint_0"
        models = prepared_models(accelerator)
        trained = whole_weights(accelerator, models[0])
        for stage in ("clip", "evaluate", "load best"):
            preflight.skip(stage, "the script has its own loop")
        if len(models) > 1:
            preflight.skip("export", "the script has prepared several models")

        def save() -> None:
            accelerator.save_state(str(folder))
            manager.wait()

        def load() -> None:
            with torch.no_grad():
                for parameter in models[0].parameters():
                    parameter.zero_()
            accelerator.load_state(str(folder))
            compare_runs(trained, whole_weights(accelerator, models[0]))

        def export() -> None:
            check_export(models[0], trained, folder)

        for stage, run in (("save", save), ("resume", load), ("export", export)):
            if not preflight.is_over(stage) and not preflight.attempt(stage, run):
                return


own_loop = OwnLoop()
"""The loop of this process."""


def whole_weights(accelerator: Any, model: Any) -> Weights:
    """Return a copy of the weights of a prepared model on rank 0, and nothing on other ranks. Collective."""
    state = accelerator.get_state_dict(model) or {}
    return {name: value.detach().to("cpu", copy=True) for name, value in state.items() if torch.is_tensor(value)}


def compare_runs(first: Weights, resumed: Weights) -> None:
    """Check that a resumed run has the weights of the uninterrupted one. Collective.

    Raises:
        SpecError: they differ.
    """
    different = broadcast_object(differing_names(first, resumed, _TOLERANCE))
    if different:
        message = f"the weights differ after resuming: {format_names(different)}."
        fix = "Store all that the training depends on in the checkpoint: the state of the optimizer, of the scheduler, "
        fix += "of callbacks and of the data, and random numbers that are not torch's, NumPy's or Python's."
        raise SpecError([Problem(code="FSDP-E753", message=message, fix=fix)])


def differing_names(one: Weights, other: Weights, tolerance: float) -> list[str]:
    """Return the names of tensors that are in one mapping only, or that differ by more than a relative tolerance."""
    names = sorted(one.keys() ^ other.keys())
    for name in one.keys() & other.keys():
        a, b = one[name].float(), other[name].float()
        largest = float(a.nan_to_num(0.0).abs().max()) if a.numel() else 0.0
        # Quantized weights that are stored as bf16 contain NaN.
        if a.shape != b.shape or not torch.allclose(a, b, rtol=0.0, atol=tolerance * largest, equal_nan=True):
            names.append(name)
    return names


def check_export(model: Any, trained: Weights, source: Path) -> None:
    """Merge a checkpoint on rank 0, load the result with ``from_pretrained``, and compare it with what was trained.

    Collective.

    Args:
        source: a checkpoint, or a folder for ``from_pretrained``.

    Raises:
        SpecError: on all ranks: the result has other weights, or an error on rank 0.
    """
    problems: list[Problem] = []
    if preflight.rank == 0:
        try:
            _check_export(unwrapped(model), trained, source)
        except Exception as error:
            problems = problems_of_error(error, "export")
    if problems := broadcast_object(problems):
        raise SpecError(problems)


def _check_export(model: Any, trained: Weights, source: Path) -> None:
    folder, wanted = source, trained
    if not any((source / name).is_file() for name in (_ADAPTER_FILE, safetensors_file(HF_MODEL))):
        folder = preflight.folder / "merged"
        merge(source, folder, MergeOptions(config=source if (source / "config.json").is_file() else None))
    if (folder / "adapter_config.json").is_file():
        stored, tolerance = load_file(folder / _ADAPTER_FILE), _ADAPTER_TOLERANCE
        adapters = {name.replace(_ADAPTER, ""): value for name, value in trained.items()}
        wanted = {name: value for name, value in adapters.items() if name in stored}
    elif hasattr(type(model), "from_pretrained") and hasattr(model, "config"):
        stored = type(model).from_pretrained(folder).state_dict()
        dtypes = {value.dtype for value in stored.values() if value.is_floating_point()}
        tolerance = max([_TOLERANCE, *(torch.finfo(dtype).eps for dtype in dtypes)])
    else:
        preflight.not_tested(f"loading the export, {type(model).__name__} has no from_pretrained")
        return
    different = differing_names(wanted, stored, tolerance)
    if different and trained:
        message = f"the exported model differs from the trained one in {format_names(different)}."
        fix = "Check that these weights are stored: tied weights, buffers and modules outside of the model's class."
        raise SpecError([Problem(code="FSDP-E754", message=message, fix=fix)])
