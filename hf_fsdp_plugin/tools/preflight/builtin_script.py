"""The training script of ``check --run``: a Trainer with a tiny clone of a model, and made data."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path
from typing import Any, Final

from transformers import HfArgumentParser, Trainer, TrainingArguments

from hf_fsdp_plugin.integrations import observing
from hf_fsdp_plugin.plan.meta_model import config_and_class
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.tools.preflight.clone import MadeData, collate, find_clone, write_clone
from hf_fsdp_plugin.tools.preflight.observer import PreflightObserver
from hf_fsdp_plugin.tools.preflight.stages import preflight
from hf_fsdp_plugin.tools.preflight.training import run_stages

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
    try:
        config, model_class = config_and_class(name)
    except SpecError:
        raise
    except (ValueError, OSError) as error:
        fix = "Give a directory with a config.json, or the name of a model in the local cache."
        problem = Problem(code="FSDP-E709", message=" ".join(str(error).split()), fix=fix)
        raise SpecError([problem]) from error
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
        preflight().not_tested(
            f"the metric {metric!r}, which is made up. Test it in a short run of your training script"
        )
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
