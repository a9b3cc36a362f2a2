"""Changes of a ``TrainingArguments`` for a preflight: temporary folders, small batches, and what needs a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from hf_fsdp_plugin.integrations.preflight.run import preflight
from hf_fsdp_plugin.problems import Problem

MAX_BATCH: Final = 2
MAX_ACCUMULATION: Final = 2
_NOT_ON_CPU: Final = {
    "torch_compile": (False, "torch.compile"),
    "torch_compile_backend": (None, ""),
    "torch_compile_mode": (None, ""),
    "use_liger_kernel": (False, "Liger's kernels"),
    "tf32": (None, "TF32"),
}
"""Field -> (value in a preflight, what is not tested)."""
_LIMITS: Final = {
    "per_device_train_batch_size": MAX_BATCH,
    "per_device_eval_batch_size": MAX_BATCH,
    "gradient_accumulation_steps": MAX_ACCUMULATION,
    "dataloader_num_workers": 1,
}


def validate_args(original: Callable[[], None], arguments: Any) -> None:
    """Let Transformers validate the values of the user, then change them for the preflight."""
    if not preflight.active:
        return original()
    _replace_gpu_features(arguments)
    original()
    for name, limit in _LIMITS.items():
        value = getattr(arguments, name, None)
        if isinstance(value, int) and value > limit:
            setattr(arguments, name, limit)
            note_change(f"{name} is {limit} instead of {value}")
    arguments.output_dir = str(preflight.folder / "out")
    arguments.report_to = []
    arguments.disable_tqdm = True
    if arguments.push_to_hub:
        arguments.push_to_hub = False
        not_tested("pushes to the Hub")
    return None


def _replace_gpu_features(arguments: Any) -> None:
    if arguments.fp16:
        arguments.fp16, arguments.bf16 = False, True
        note_change("bf16 is used instead of fp16, which FSDP cannot run on the CPU")
    for name, (value, what) in _NOT_ON_CPU.items():
        if getattr(arguments, name, None):
            setattr(arguments, name, value)
            if what:
                not_tested(f"{what} ({name})")


def note_change(text: str) -> None:
    """Record what the preflight has changed."""
    preflight.recorder.note(Problem(code="FSDP-N757", message=f"{text}."))


def not_tested(what: str) -> None:
    """Record what a preflight cannot test."""
    preflight.recorder.note(Problem(code="FSDP-W756", message=f"not tested: {what}."))
