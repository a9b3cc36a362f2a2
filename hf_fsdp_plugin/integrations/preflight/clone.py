"""The tiny clone of a model: the same classes and units, with few layers and small widths, and random weights."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

import torch
from torch import nn

from hf_fsdp_plugin.integrations.preflight.made_data import MadeData, collate
from hf_fsdp_plugin.integrations.preflight.sizes import Reduction, Widths, num_layers_of, small_config
from hf_fsdp_plugin.plan.meta_model import config_and_class, default_dtype
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.text import format_count, format_names

MAX_PARAMS: Final = 200_000_000
"""Maximum parameters of a clone: a rank needs some 16 bytes for each."""
_NUM_LAYERS: Final = (2, 3, 4, 6, 8, 12)
_SEED: Final = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Clone:
    """The config of a clone, and how it compares with the model.

    Attributes:
        config: of Transformers.
        num_params, real_num_params: parameters of the clone and of the model.
        problems: warnings, if the clone has other classes or units than the model.
    """

    config: Any
    num_params: int
    real_num_params: int
    problems: tuple[Problem, ...] = ()


def on_meta(model_class: Any, config: Any) -> nn.Module:
    """Return the model of a config without weights."""
    with default_dtype(config), torch.device("meta"):
        model: nn.Module = model_class(config)
    return model


def classes_of(model: nn.Module) -> set[str]:
    """Return the names of the classes of all modules of a model."""
    return {type(module).__name__ for module in model.modules()}


def num_params_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def unit_kinds(spec: FsdpSpec, model: nn.Module, world_size: int) -> set[str] | None:
    """Return the classes of the units of a plan; ``None`` if there is no plan, which is reported when it is made."""
    try:
        return {unit.class_name for unit in resolve(spec, model, world_size=world_size).units}
    except (SpecError, ValueError):
        return None


def find_clone(
    model_class: Any, config: Any, *, spec: FsdpSpec | None = None, world_size: int = 2, keep_vocabulary: bool = False
) -> Clone:
    """Return the smallest clone that has the model's classes and units, and that runs.

    Widths are divided by one factor in the whole model, else in each part of it by its own, else they are kept.

    Args:
        model_class: class of Transformers.
        spec: the spec whose units are compared; ``None`` compares the classes only.
        keep_vocabulary: for the real tokenizer.

    Raises:
        SpecError: no clone is small enough, or the model cannot be built.
    """
    try:
        real = on_meta(model_class, config)
    except Exception as error:
        raise SpecError([_cannot_build(model_class, error)]) from error
    reasons: list[str] = []
    found = []
    for widths in get_args(Widths):
        candidate = _with_all_classes(model_class, config, real, widths, keep_vocabulary, reasons)
        if candidate is None:
            continue
        small, model = candidate
        if num_params_of(model) > MAX_PARAMS:
            reasons.append(f"with widths={widths!r} it has {format_count(num_params_of(model))} parameters")
            continue
        found.append((widths, candidate))
        reason = _why_it_does_not_run(model_class, small)
        if not reason:
            break
        reasons.append(reason)
    else:  # none runs, so the reason is not the size: the smallest one shows it
        found = found[:1]
    if not found:
        message = f"no clone of {model_class.__name__} is small enough: {'; '.join(reasons)}."
        fix = f"Give a model of the same architecture with fewer than {format_count(MAX_PARAMS)} parameters."
        raise SpecError([Problem(code="FSDP-E752", message=message, fix=fix)])
    widths, (small, model) = found[-1]
    problems = list(_differences(real, model, spec, world_size))
    if widths == "none" and reasons:
        problems.append(_widths_kept(reasons))
    return Clone(
        config=small, num_params=num_params_of(model), real_num_params=num_params_of(real), problems=tuple(problems)
    )


def _with_all_classes(
    model_class: Any, config: Any, real: nn.Module, widths: Widths, keep_vocabulary: bool, reasons: list[str]
) -> tuple[Any, nn.Module] | None:
    """Return the config and the model with the fewest layers that have all classes of the model."""
    last = None
    for num_layers in (number for number in _NUM_LAYERS if number <= max(2, num_layers_of(config))):
        reduction = Reduction(num_layers=num_layers, widths=widths)
        if keep_vocabulary:
            reduction = Reduction(num_layers=num_layers, widths=widths, vocabulary=None)
        try:
            small = small_config(config, reduction)
            last = small, on_meta(model_class, small)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        if classes_of(last[1]) == classes_of(real):
            return last
    return last


def _why_it_does_not_run(model_class: Any, config: Any) -> str:
    """Return why a clone cannot compute its loss of made data; empty if it can, or if there is no such data."""
    try:
        with torch.random.fork_rng(devices=[]), default_dtype(config), torch.no_grad():
            model = model_class(config)
            data = MadeData(model, 2)
            model(**collate([data[0], data[1]]))
    except ValueError as error:
        return "" if "no made data" in str(error) else str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _differences(real: nn.Module, clone: nn.Module, spec: FsdpSpec | None, world_size: int) -> Iterator[Problem]:
    missing = sorted(classes_of(real) - classes_of(clone))
    if missing:
        message = f"the clone has no module of class {format_names(missing)}, which the model has in its later layers."
        yield Problem(code="FSDP-W759", message=message, fix="Test these layers in a short run of the whole model.")
    if spec is None:
        return
    wanted, found = unit_kinds(spec, real, world_size), unit_kinds(spec, clone, world_size)
    if wanted is not None and found is not None and wanted != found:
        message = f"the units of the clone are {format_names(sorted(found))}; those of the model are "
        message += f"{format_names(sorted(wanted))}."
        fix = "Check the units of the model with `hf-fsdp check --model`."
        yield Problem(code="FSDP-W759", setting="wrap.policy", message=message, fix=fix)


def _widths_kept(reasons: list[str]) -> Problem:
    message = f"the clone has the widths of the model and fewer layers, because smaller widths failed: {reasons[0]}"
    return Problem(code="FSDP-N757", message=message)


def _cannot_build(model_class: Any, error: Exception) -> Problem:
    message = f"{model_class.__name__} cannot be built from its config: {error}"
    return Problem(code="FSDP-E752", message=message, fix="Correct the config.json of the model.")


def scaled_threshold(spec: FsdpSpec, model: str, world_size: int, *, keep_vocabulary: bool) -> tuple[int, bool] | None:
    """Return the result of :func:`threshold_of_clone` for the clone of a model; ``None`` if there is no clone."""
    try:
        config, model_class = config_and_class(model)
        clone = find_clone(model_class, config, world_size=world_size, keep_vocabulary=keep_vocabulary)
        real, small = on_meta(model_class, config), on_meta(model_class, clone.config)
    except (SpecError, ValueError, OSError):
        return None
    return threshold_of_clone(spec, real, small, world_size)


def threshold_of_clone(spec: FsdpSpec, real: nn.Module, clone: nn.Module, world_size: int) -> tuple[int, bool]:
    """Return the ``wrap.min_num_params`` for the clone, and whether it has the same kinds of units as the model.

    If there is no such size, the threshold is reduced by the ratio of the parameters.
    """
    wanted = unit_kinds(spec, real, world_size)
    ratio = num_params_of(clone) / max(1, num_params_of(real))
    scaled = max(1, int(spec.wrap.min_num_params * ratio))
    sizes = {num_params_of(module) for module in clone.modules()} - {0}
    for threshold in sorted({scaled, *sizes}, key=lambda size: abs(size - scaled)):
        small = spec.with_values({"wrap.min_num_params": threshold}, {})
        if unit_kinds(small, clone, world_size) == wanted:
            return threshold, True
    return scaled, False


def write_clone(model_class: Any, clone: Clone, folder: Path) -> None:
    """Write a clone with random weights as a Hugging Face folder, which appears when it is complete."""
    if folder.exists():
        return
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    with torch.random.fork_rng(devices=[]), default_dtype(clone.config):
        torch.manual_seed(_SEED)
        model_class(clone.config).save_pretrained(partial)
    os.replace(partial, folder)


def wait_for_clone(folder: Path, seconds: float) -> bool:
    """Wait until another rank has written a clone. Return whether it has."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if folder.exists():
            return True
        time.sleep(0.05)
    return False
