"""Selects the modules that compute in fp32 while the rest of the model computes in 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from hf_fsdp_plugin.plan.model import Backend, PrecisionPlan
from hf_fsdp_plugin.plan.modules import ModuleTree, ParameterEntry, is_inside
from hf_fsdp_plugin.plan.policy import matching_modules
from hf_fsdp_plugin.plan.problem_collector import ProblemCollector
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.text import format_names, plural
from hf_fsdp_plugin.torch_private.fsdp2_behavior import first_version_with_dtype_per_parameter, installed_behavior

SETTING: Final = "precision.fp32_modules"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp32Parts:
    """What computes in fp32.

    Attributes:
        modules: names of the outermost modules, and of modules outside of them that have one of the parameters too.
        parameters: the first name of each of their sharded parameters, in the order of the model.
    """

    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


def resolve_fp32_modules(
    spec: FsdpSpec,
    model: nn.Module,
    precision: PrecisionPlan,
    backend: Backend,
    ignored_parameters: tuple[str, ...],
    problems: ProblemCollector,
) -> Fp32Parts:
    """Return the modules that ``precision.fp32_modules`` selects; empty without the setting or mixed precision.

    Args:
        ignored_parameters: names of the parameters that are not sharded. FSDP does not cast them.
    """
    matched = matching_modules(spec, SETTING, model, problems)
    if not matched:
        return Fp32Parts()
    tree = ModuleTree(model)
    entries = [
        entry
        for entry in tree.parameters
        if entry.parameter.is_floating_point()
        and entry.name not in ignored_parameters
        and any(is_inside(name, outer) for name in entry.names for outer in matched)
    ]
    if not entries:
        problems.add(
            "FSDP-E212",
            SETTING,
            f"no sharded parameter is in the modules that {spec.precision.fp32_modules!r} matches: "
            f"{format_names(matched, 3)}.",
            "Write a pattern for modules with parameters, or remove the key.",
        )
        return Fp32Parts()
    _check_stored_dtype(entries, precision, problems)
    if precision.param not in ("bf16", "fp16"):
        return Fp32Parts()  # nothing is cast
    _check_support(backend, problems)
    owners = dict.fromkeys(path for entry in entries for path in entry.modules)
    outermost = [name for name in matched if not any(name != other and is_inside(name, other) for other in matched)]
    tied = [path for path in owners if not any(is_inside(path, outer) for outer in outermost)]
    return Fp32Parts(modules=(*outermost, *tied), parameters=tuple(entry.name for entry in entries))


def _check_stored_dtype(entries: list[ParameterEntry], precision: PrecisionPlan, problems: ProblemCollector) -> None:
    """Report parameters whose shards are not fp32: FSDP2 gathers a parameter in its stored dtype or in that of all."""
    others = [
        entry
        for entry in entries
        if entry.parameter.dtype != torch.float32 and not (precision.master == "fp32" and entry.parameter.requires_grad)
    ]
    if not others:
        return
    dtypes = sorted({str(entry.parameter.dtype).removeprefix("torch.") for entry in others})
    why = "they are frozen" if precision.master == "fp32" else "mixed precision is off"
    problems.add(
        "FSDP-E283",
        SETTING,
        f"{plural(len(others), 'parameter')} of the selected modules cannot be computed in fp32: the shards are stored "
        f"in {', '.join(dtypes)}, because {why}: {format_names([entry.name for entry in others])}.",
        "Load these modules in float32, or write a pattern without them."
        if precision.master == "fp32"
        else "Set mixed_precision: bf16, which stores trainable parameters in float32, or load the model in float32.",
    )


def _check_support(backend: Backend, problems: ProblemCollector) -> None:
    needed = first_version_with_dtype_per_parameter()
    if backend == "fsdp1":
        message, fix = (
            "FSDP1 computes all parameters of a unit in one dtype.",
            f"Set fsdp_version: 2, with torch {needed}",
        )
    elif not installed_behavior().dtype_per_parameter:
        message = f"FSDP2 of torch {torch.__version__} computes all parameters of a unit in one dtype."
        fix = f"Install torch {needed}"
    else:
        return
    problems.add("FSDP-E282", SETTING, message, f"{fix} or newer, or remove the key.")
