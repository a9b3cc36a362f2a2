"""The training of a preflight, with the Trainer.

The stages are recorded while a few steps run. The stages that follow them run after the last step: a second run
continues from the checkpoint, and the checkpoint is exported. Both must have the weights of the first run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from transformers.trainer_callback import TrainerCallback

from hf_fsdp_plugin.backends.ranks.agreement import broadcast_object
from hf_fsdp_plugin.checkpoint.merging.merge import MergeOptions, merge
from hf_fsdp_plugin.checkpoint.names import HF_MODEL, TRAINER_PREFIX, safetensors_file
from hf_fsdp_plugin.integrations.accelerate.run_report import report_run
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.integrations.transformers.private import save_checkpoint
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.tools.preflight.stages import REPORT_FILE, preflight, problems_of_error

SAVED_STEP: Final = 1
"""The step after which a checkpoint is written, from which the second run continues."""
LAST_STEP: Final = 3
"""The first step whose learning rate a resumed scheduler computes: the optimizer stores the learning rate of step 2."""
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
        self._is_first = preflight().phase == "first run"
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
        if "loss" in logs and control.should_evaluate:  # the Trainer evaluates right after it has logged the loss
            self._enter("evaluate")
        if "train_runtime" in logs and args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._enter("load best")

    def _enter(self, stage: str) -> None:
        if self._is_first:
            preflight().enter(stage)

    def _control(self, args: Any, state: Any, control: Any, *, is_saved_step: bool) -> None:
        control.should_log = is_saved_step
        control.should_evaluate = is_saved_step and args.eval_strategy != "no"
        control.should_save = is_saved_step and args.save_strategy != "no"
        control.should_training_stop |= state.global_step >= LAST_STEP


def run_stages(make_trainer: Callable[[], Any]) -> None:
    """Run three steps, resume from the checkpoint of the first one with a fresh Trainer, and export the checkpoint.

    Args:
        make_trainer: returns a new Trainer with a new model.
    """
    trainer = make_trainer()
    preflight().phase = "first run"
    callback = StageCallback(trainer)
    trainer.add_callback(callback)

    def train() -> None:
        trainer.train()
        manager().wait()
        preflight().enter(None)
        report_run(trainer.accelerator)
        file = preflight().folder / REPORT_FILE
        if preflight().rank == 0 and file.is_file():  # settings that differ from the plan, for example
            for problem in json.loads(file.read_text())["problems"]:
                if problem["severity"] != "note":
                    preflight().note(Problem(**{name: problem[name] for name in ("code", "message", "fix", "setting")}))

    preflight().attempt("prepare", train)
    trainer.remove_callback(callback)
    preflight().phase = "afterwards"  # what follows records no stages
    no_saves = trainer.args.save_strategy == "no"
    for stage, is_skipped, reason in (
        ("clip", preflight().has_passed("update"), "the Trainer does not clip gradients with the Accelerator"),
        ("evaluate", trainer.args.eval_strategy == "no", "eval_strategy is no"),
        ("save", no_saves, "save_strategy is no"),
        ("load best", not trainer.args.load_best_model_at_end, "load_best_model_at_end is not set"),
        ("resume", no_saves, "save_strategy is no"),
        ("resume", trainer.args.save_only_model, "save_only_model is set, so these checkpoints cannot be resumed"),
    ):
        if is_skipped:
            preflight().skip(stage, reason)
    if preflight().has_passed("prepare"):
        _further_stages(trainer, make_trainer, callback.weights)


def _further_stages(trainer: Any, make_trainer: Callable[[], Any], weights: Mapping[int, Weights]) -> None:
    """Run the stages that a failure has skipped, and those after the training.

    Args:
        weights: step -> weights of the first run after it.
    """
    checkpoint = Path(trainer.args.output_dir) / f"{TRAINER_PREFIX}{SAVED_STEP}"

    def attempt(stage: str, run: Callable[[], Any]) -> None:
        if not preflight().is_over(stage):
            preflight().attempt(stage, run)

    def resume() -> None:
        fresh = make_trainer()
        callback = StageCallback(fresh)
        fresh.add_callback(callback)
        fresh.args.load_best_model_at_end = False
        fresh.train(resume_from_checkpoint=str(checkpoint))
        if LAST_STEP in weights:  # else the first run has failed before
            compare_runs(weights[LAST_STEP], callback.weights.get(LAST_STEP, {}))

    def export_model() -> None:
        folder = preflight().folder / "exported"
        trainer.save_model(str(folder))
        check_export(trainer.model, weights.get(trainer.state.global_step, {}), folder)

    attempt("evaluate", trainer.evaluate)
    attempt("save", lambda: save_checkpoint(trainer))
    if preflight().has_passed("save") and checkpoint.is_dir():
        attempt("resume", resume)
        attempt("export", lambda: check_export(trainer.model, weights.get(SAVED_STEP, {}), checkpoint))
    elif trainer.args.save_strategy == "no":
        attempt("export", export_model)


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
    if preflight().rank == 0:
        try:
            _check_export(unwrapped(model), trained, source)
        except Exception as error:
            problems = problems_of_error(error, "export")
    if problems := broadcast_object(problems):
        raise SpecError(problems)


def _check_export(model: Any, trained: Weights, source: Path) -> None:
    folder, wanted = source, trained
    if not any((source / name).is_file() for name in (_ADAPTER_FILE, safetensors_file(HF_MODEL))):
        folder = preflight().folder / "merged"
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
        preflight().not_tested(f"loading the export, {type(model).__name__} has no from_pretrained")
        return
    different = differing_names(wanted, stored, tolerance)
    if different and trained:
        message = f"the exported model differs from the trained one in {format_names(different)}."
        fix = "Check that these weights are stored: tied weights, buffers and modules outside of the model's class."
        raise SpecError([Problem(code="FSDP-E754", message=message, fix=fix)])
