"""Compares the weights that a run has trained with those of a resumed run and of an exported checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

from hf_fsdp_plugin.backends.ranks.agreement import broadcast_object
from hf_fsdp_plugin.checkpoint import MergeOptions, merge
from hf_fsdp_plugin.checkpoint.names import HF_MODEL, safetensors_file
from hf_fsdp_plugin.integrations.preflight.run import not_tested, preflight, problems_of_error
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_names

_TOLERANCE: Final = 1e-5
"""Largest relative difference of weights after resuming. On the CPU they are usually equal."""
_ADAPTER_TOLERANCE: Final = 1e-2
_ADAPTER: Final = ".default"
_ADAPTER_FILE: Final = "adapter_model.safetensors"


Weights = Mapping[str, torch.Tensor]


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
        not_tested(f"loading the export, {type(model).__name__} has no from_pretrained")
        return
    different = differing_names(wanted, stored, tolerance)
    if different and trained:
        message = f"the exported model differs from the trained one in {format_names(different)}."
        fix = "Check that these weights are stored: tied weights, buffers and modules outside of the model's class."
        raise SpecError([Problem(code="FSDP-E754", message=message, fix=fix)])
