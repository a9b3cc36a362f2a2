"""What a run has trained, compared with a resumed run and with an exported checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from hf_fsdp_plugin.backends.agreement import broadcast_object
from hf_fsdp_plugin.checkpoint import MergeOptions, merge
from hf_fsdp_plugin.checkpoint.names import HF_MODEL, safetensors_file
from hf_fsdp_plugin.integrations.preflight.run import preflight, problems_of_error
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_names

_TOLERANCE: Final = 1e-5
"""Largest relative difference of losses and weights after resuming. On the CPU they are usually equal."""
_COMPARED_LOGS: Final = ("loss", "grad_norm", "learning_rate")
_ADAPTER: Final = ".default"
_ADAPTER_FILE: Final = "adapter_model.safetensors"


class Trained:
    """What one run has logged, and the weights of rank 0, by step.

    Attributes:
        logs: step -> what the Trainer has logged for it.
        weights: step -> name -> tensor; without entries on other ranks.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.logs: dict[int, dict[str, Any]] = {}
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def capture(self, step: int) -> None:
        """Keep the weights after a step. Collective."""
        state = self.trainer.accelerator.get_state_dict(self.trainer.model) or {}
        found = {name: value.detach().to("cpu", copy=True) for name, value in state.items() if torch.is_tensor(value)}
        self.weights[step] = found


def compare_runs(first: Trained, resumed: Trained, step: int) -> None:
    """Check that a resumed run has the logs and weights of the uninterrupted one. Collective.

    Raises:
        SpecError: they differ.
    """
    if step not in first.logs:  # the first run has failed before, so there is nothing to compare
        return
    problems = []
    wanted, found = first.logs.get(step, {}), resumed.logs.get(step, {})
    for name in _COMPARED_LOGS:
        if name in wanted and not _is_close(wanted[name], found.get(name)):
            message = (
                f"{name} of step {step} is {found.get(name)} after resuming, and {wanted[name]} without interruption."
            )
            problems.append(Problem(code="FSDP-E753", message=message, fix=_advice(name)))
    different = broadcast_object(differing(first.weights.get(step, {}), resumed.weights.get(step, {}), _TOLERANCE))
    if different:
        message = f"weights of step {step} differ after resuming: {format_names(different)}."
        problems.append(Problem(code="FSDP-E753", message=message, fix=_advice("weights")))
    if problems:
        raise SpecError(problems)


def _advice(what: str) -> str:
    if what == "learning_rate":
        return "The state of the scheduler is not restored: store all of it in its state_dict."
    return (
        "Something that the training depends on is not in the checkpoint: state of the optimizer, of a callback or of "
        "the data, or random numbers that are not torch's, NumPy's or Python's."
    )


def _is_close(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    a, b = float(one), float(other)
    return a == b or abs(a - b) <= _TOLERANCE * max(abs(a), abs(b)) or (a != a and b != b)


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], tolerance: float) -> list[str]:
    """Return the names of tensors that are in one mapping only, or that differ by more than a relative tolerance."""
    names = sorted(one.keys() ^ other.keys())
    for name in one.keys() & other.keys():
        a, b = one[name].float(), other[name].float()
        if a.shape != b.shape or not _are_close(a, b, tolerance):
            names.append(name)
    return names


def _are_close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if not a.numel():
        return True
    same = (a == b) | (a.isnan() & b.isnan())  # quantized weights that are stored as bf16 contain NaN
    difference = torch.where(same, 0.0, (a - b).abs()).max()
    return bool(difference <= tolerance * a.nan_to_num(0.0).abs().max())


def check_export(trained: Trained, source: Path, step: int) -> None:
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
            _check_export(trained, source, step)
        except Exception as error:
            problems = problems_of_error(error, "export")
    if problems := broadcast_object(problems):
        raise SpecError(problems)


def _check_export(trained: Trained, source: Path, step: int) -> None:
    model: Any = unwrapped(trained.trainer.model)
    folder = source
    if not any((source / name).is_file() for name in (_ADAPTER_FILE, safetensors_file(HF_MODEL))):
        folder = preflight.folder / "merged"
        merge(source, folder, MergeOptions(config=source if (source / "config.json").is_file() else None))
    wanted = trained.weights.get(step, {})
    if (folder / "adapter_config.json").is_file():
        different = _differing_adapters(folder, wanted)
    elif hasattr(type(model), "from_pretrained") and hasattr(model, "config"):
        loaded = type(model).from_pretrained(folder)
        dtypes = {value.dtype for value in loaded.state_dict().values() if value.is_floating_point()}
        tolerance = max([_TOLERANCE, *(torch.finfo(dtype).eps for dtype in dtypes)])
        different = differing(wanted, loaded.state_dict(), tolerance)
    else:
        preflight.recorder.note(
            Problem(
                code="FSDP-W756",
                message=f"not tested: loading the export, {type(model).__name__} has no from_pretrained.",
            )
        )
        return
    if different and wanted:
        message = f"the exported model differs from the trained one in {format_names(different)}."
        fix = "Check that these weights are stored: tied weights, buffers and modules outside of the model's class."
        raise SpecError([Problem(code="FSDP-E754", message=message, fix=fix)])


def _differing_adapters(folder: Path, wanted: Mapping[str, torch.Tensor]) -> list[str]:
    from safetensors.torch import load_file

    stored = load_file(folder / _ADAPTER_FILE)
    trained = {name.replace(_ADAPTER, ""): value for name, value in wanted.items()}
    return [
        name
        for name, value in stored.items()
        if differing({name: trained.get(name, torch.empty(0))}, {name: value}, 1e-2)
    ]
