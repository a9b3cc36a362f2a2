"""The training of ``check --run``: a Trainer with a tiny clone of a model, and made data.

The stages are recorded while a few steps run. The stages that follow them run after the last step: a second run
continues from the checkpoint, and the checkpoint is exported. Both must have the weights of the first run.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback

from hf_fsdp_plugin.backends.ranks.agreement import broadcast_object
from hf_fsdp_plugin.checkpoint.names import HF_MODEL, TRAINER_PREFIX, safetensors_file
from hf_fsdp_plugin.integrations import observing
from hf_fsdp_plugin.integrations.accelerate.run_report import report_run
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.observers import ObservedPhase, Observer
from hf_fsdp_plugin.plan.model_config import config_and_class
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.tools.check.output import reading_model
from hf_fsdp_plugin.tools.merge.merging import MergeOptions, merge
from hf_fsdp_plugin.tools.preflight.clone import MadeData, collate, find_clone, write_clone
from hf_fsdp_plugin.tools.preflight.stages import REPORT_FILE, preflight, problems_of_error

_STAGES: Final = {"clipping": "clip", "checkpoint": "save"}
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

_NUM_SAMPLES: Final = 100_000
"""Samples that the data set claims to have, so that an epoch is as long as in a real training."""
_NUM_EVALUATED: Final = 8
_CLONE_SECONDS: Final = 60.0
_NOT_ON_CPU: Final = {
    "torch_compile": (False, "torch.compile"),
    "torch_compile_backend": (None, ""),
    "torch_compile_mode": (None, ""),
    "use_liger_kernel": (False, "Liger's kernels"),
    "tf32": (None, "TF32"),
}
"""Field -> (value in a preflight, what is not tested)."""
_LIMITS: Final = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "dataloader_num_workers": 1,
}


class PreflightObserver(Observer):
    """Records the stages of calls that this package replaces for every run."""

    may_end_run = True

    def phase(self, phase: ObservedPhase) -> AbstractContextManager[Any]:
        """Return the stage of a phase. Only the first run records stages."""
        records = phase in _STAGES and preflight().active and preflight().records
        return preflight().stage(_STAGES[phase]) if records else nullcontext()


class PreflightArguments(TrainingArguments):
    """The arguments of the user, which Transformers validates, with the values of a preflight where they differ."""

    def __post_init__(self) -> None:
        if self.fp16:
            self.fp16, self.bf16 = False, True
            preflight().note_change("bf16 is used instead of fp16, which FSDP cannot run on the CPU")
        for name, (value, what) in _NOT_ON_CPU.items():
            if getattr(self, name, None):
                setattr(self, name, value)
                if what:
                    preflight().not_tested(f"{what} ({name})")
        super().__post_init__()
        for name, limit in _LIMITS.items():
            value = getattr(self, name, None)
            if isinstance(value, int) and value > limit:
                setattr(self, name, limit)
                preflight().note_change(f"{name} is {limit} instead of {value}")
        self.output_dir = str(preflight().folder / "out")
        self.report_to = []
        self.disable_tqdm = True
        if self.push_to_hub:
            self.push_to_hub = False
            preflight().not_tested("pushes to the Hub")


def train() -> None:
    """Make the clone, and run all stages with it."""
    observing.attach(PreflightObserver())
    name = preflight().options.model
    parse_arguments()  # before a clone is made
    with reading_model(name):
        config, model_class = config_and_class(name)
    if name.endswith(".gguf"):
        preflight().not_tested("reading the GGUF file")
    with preflight().stage("clone"):
        folder = _clone_folder(model_class, config)
    run_stages(lambda: _make_trainer(model_class, folder))


def _make_trainer(model_class: Any, folder: Path) -> Trainer:
    """Return a Trainer with a new model, which is loaded from the folder of the clone."""
    arguments = parse_arguments()
    model = model_class.from_pretrained(str(folder))
    try:
        data = MadeData(model, _NUM_SAMPLES)
        evaluated = MadeData(model, _NUM_EVALUATED)
    except ValueError as error:
        fix = "Test this model in a short run of your training script."
        raise SpecError([Problem(code="FSDP-E752", message=str(error), fix=fix)]) from error
    if getattr(model.config, "vision_config", None) is not None and "pixel_values" not in data[0]:
        preflight().not_tested("images: the made data has text only. Test them in a short run of your training script")
    metric = (arguments.metric_for_best_model or "loss").removeprefix("eval_")
    if metric != "loss":
        what = f"the metric {metric!r}, which is made up. Test it in a short run of your training script"
        preflight().not_tested(what)
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=evaluated,
        data_collator=collate,
        compute_metrics=None if metric == "loss" else lambda prediction: {metric: 0.5},
    )


def _clone_folder(model_class: Any, config: Any) -> Path:
    """Return the folder of the clone. The first rank writes it, the others wait for it."""
    clone, folder = find_clone(model_class, config), preflight().folder / "clone"
    for problem in clone.problems:
        preflight().note(problem)
    if getattr(config, "quantization_config", None) is not None:
        preflight().not_tested("quantization that the config of the model declares")
    preflight().record.model |= {
        "name": model_class.__name__, "num_params": clone.num_params, "real_num_params": clone.real_num_params
    }  # fmt: skip
    if preflight().rank == 0:
        write_clone(model_class, clone, folder)
    deadline = time.monotonic() + _CLONE_SECONDS
    while not folder.exists():
        if time.monotonic() > deadline:
            message = f"rank 0 did not write the clone of {model_class.__name__} in {_CLONE_SECONDS:g} s."
            raise SpecError([Problem(code="FSDP-E752", message=message, fix="See the problem of rank 0.")])
        time.sleep(0.05)
    return folder


def parse_arguments() -> PreflightArguments:
    """Return the ``TrainingArguments`` of the flags of the user.

    Raises:
        SpecError: an unknown field, or values that Transformers refuses.
    """
    parser = HfArgumentParser(PreflightArguments)  # type: ignore[arg-type]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            (parsed,) = parser.parse_args_into_dataclasses(["--eval_strategy", "steps", *preflight().options.arguments])
    except SpecError:
        raise
    except (SystemExit, ValueError, ImportError, NotImplementedError) as error:
        is_exit = isinstance(error, SystemExit)  # of argparse, which has printed the reason
        reason = printed.getvalue().strip().splitlines()[-1] if is_exit else " ".join(str(error).split())
        message = f"TrainingArguments refuse the arguments: {reason}"
        fix = "Correct the flags that belong neither to hf-fsdp check nor to the settings."
        raise SpecError([Problem(code="FSDP-E751", message=message, fix=fix)]) from error
    return parsed


class StageCallback(TrainerCallback):
    """Records the stages of the first run, and the weights of each step.

    It is the last callback, so it decides when a run evaluates, saves and stops.

    Attributes:
        weights: step -> weights after it.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._is_first = preflight().records
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
    preflight().records = True
    callback = StageCallback(trainer)
    trainer.add_callback(callback)

    preflight().enter("prepare")
    trainer.train()
    manager().wait()
    preflight().enter(None)
    report_run(trainer.accelerator)
    file = preflight().folder / REPORT_FILE
    if preflight().rank == 0 and file.is_file():  # settings that differ from the plan, for example
        for problem in json.loads(file.read_text())["problems"]:
            if problem["severity"] != "note":
                preflight().note(Problem(**{name: problem[name] for name in ("code", "message", "fix", "setting")}))
    trainer.remove_callback(callback)
    preflight().records = False
    arguments = trainer.args
    no_saves = arguments.save_strategy == "no"
    for stage, is_skipped, reason in (
        ("clip", True, "the Trainer does not clip gradients with the Accelerator"),
        ("evaluate", arguments.eval_strategy == "no", "eval_strategy is no"),
        ("save", no_saves, "save_strategy is no"),
        ("load best", not arguments.load_best_model_at_end, "load_best_model_at_end is not set"),
        ("resume", no_saves, "save_strategy is no"),
        ("resume", arguments.save_only_model, "save_only_model is set, so these checkpoints cannot be resumed"),
    ):
        if is_skipped:
            preflight().skip(stage, reason)
    checkpoint, source = Path(arguments.output_dir) / f"{TRAINER_PREFIX}{SAVED_STEP}", preflight().folder / "exported"
    if not no_saves and not arguments.save_only_model:
        with preflight().stage("resume"):
            _resume(make_trainer(), checkpoint, callback.weights)
    with preflight().stage("export"):
        if no_saves:
            trainer.save_model(str(source))
        step = trainer.state.global_step if no_saves else SAVED_STEP
        check_export(trainer.model, callback.weights[step], source if no_saves else checkpoint)


def _resume(trainer: Any, checkpoint: Path, weights: Mapping[int, Weights]) -> None:
    """Continue from a checkpoint with a fresh Trainer, and check the weights after the last step.

    Args:
        weights: step -> weights of the first run after it.
    """
    callback = StageCallback(trainer)
    trainer.add_callback(callback)
    trainer.args.load_best_model_at_end = False
    trainer.train(resume_from_checkpoint=str(checkpoint))
    if (last := max(weights)) > SAVED_STEP:  # else max_steps leaves nothing to train
        compare_runs(weights[last], callback.weights.get(last, {}))


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
    if different:
        message = f"the exported model differs from the trained one in {format_names(different)}."
        fix = "Check that these weights are stored: tied weights, buffers and modules outside of the model's class."
        raise SpecError([Problem(code="FSDP-E754", message=message, fix=fix)])
