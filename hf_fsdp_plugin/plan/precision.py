"""Resolves the precision: the planned dtypes, and the modules that compute in fp32 in mixed precision."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import ModelParts, PlannedDtype, PrecisionPlan, ProblemCollector
from hf_fsdp_plugin.plan.modules import ModuleTree
from hf_fsdp_plugin.plan.names import is_inside
from hf_fsdp_plugin.plan.wrap_policy import matching_modules
from hf_fsdp_plugin.spec.fsdp_spec import DtypeName
from hf_fsdp_plugin.spec.rules import FP16_ON_CPU
from hf_fsdp_plugin.text import format_dtype, format_names, plural
from hf_fsdp_plugin.torch_private.fsdp2 import first_version_with_dtype_per_parameter, installed_behavior

_FP32_MODULES: Final = "precision.fp32_modules"
_MIXED: Final = ("bf16", "fp16")


def resolve_precision(model: nn.Module, device_type: str, problems: ProblemCollector) -> PrecisionPlan:
    """Return the planned dtypes.

    With mixed precision, trainable parameters are stored in fp32, and cast for each all-gather.
    """
    asked = problems.spec.precision
    dtypes: dict[str, PlannedDtype] = {}
    for field in ("param", "reduce", "output", "buffer"):
        dtype: DtypeName = getattr(asked, field)
        dtypes[field] = "unchanged" if dtype == "auto" else dtype
        if dtype == "fp16" and device_type == "cpu":
            problems.add("FSDP-E147", f"precision.{field}", *FP16_ON_CPU)
    if asked.param in _MIXED:
        return PrecisionPlan(**dtypes, master="fp32", fp32_modules=asked.fp32_modules)
    trained = {p.dtype for p in model.parameters() if p.requires_grad and p.is_floating_point()}
    if trained in ({torch.bfloat16}, {torch.float16}):
        name = format_dtype(trained.pop())
        message = (
            f"the model is {name} and mixed precision is off, so master weights and optimizer state are {name} too. "
            "Small updates are rounded to zero."
        )
        fix = "Set mixed_precision: bf16 to store master weights in float32, or load the model in float32."
        problems.add("FSDP-W231", "precision.param", message, fix)
    return PrecisionPlan(**dtypes, master="unchanged", fp32_modules=asked.fp32_modules)


def resolve_fp32_modules(
    model: nn.Module, precision: PrecisionPlan, parts: ModelParts, problems: ProblemCollector
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what ``precision.fp32_modules`` selects: modules and sharded parameters. FSDP casts no others.

    The modules are the outermost ones that match, and other modules that share a parameter with them. The parameters
    have their first names, in the order of the model. Both are empty without the setting or mixed precision.
    """
    matched = matching_modules(_FP32_MODULES, model, problems)
    if not matched:
        return (), ()
    entries = [
        entry
        for entry in ModuleTree(model).parameters
        if entry.is_floating
        and entry.name not in parts.ignored_parameters
        and any(is_inside(name, outer) for name in entry.names for outer in matched)
    ]
    if not entries:
        message = (
            f"no sharded parameter is in the modules that {precision.fp32_modules!r} matches: "
            f"{format_names(matched, 3)}."
        )
        fix = "Write a pattern for modules with parameters, or remove the key."
        problems.add("FSDP-E212", _FP32_MODULES, message, fix)
        return (), ()
    # FSDP2 can leave a parameter uncast, but not cast it to fp32.
    others = [entry for entry in entries if entry.stored_dtype(precision.master) != torch.float32]
    if others:
        dtypes = sorted({format_dtype(entry.parameter.dtype) for entry in others})
        why = "mixed precision is off"
        fix = "Set mixed_precision: bf16, which stores trainable parameters in float32, or load the model in float32."
        if precision.master == "fp32":
            why, fix = "they are frozen", "Load these modules in float32, or write a pattern without them."
        message = (
            f"{plural(len(others), 'parameter')} of the selected modules cannot be computed in fp32: the shards are "
            f"stored in {', '.join(dtypes)}, because {why}: {format_names([entry.name for entry in others])}."
        )
        problems.add("FSDP-E283", _FP32_MODULES, message, fix)
    if precision.param not in _MIXED:
        return (), ()  # nothing is cast
    if parts.backend == "fsdp1" or not installed_behavior().dtype_per_parameter:
        is_fsdp1, needed = parts.backend == "fsdp1", first_version_with_dtype_per_parameter()
        version = "FSDP1" if is_fsdp1 else f"FSDP2 of torch {torch.__version__}"
        fix = f"{'Set fsdp_version: 2, with' if is_fsdp1 else 'Install'} torch {needed} or newer, or remove the key."
        message = f"{version} computes all parameters of a unit in one dtype."
        problems.add("FSDP-E282", _FP32_MODULES, message, fix)
    owners = dict.fromkeys(path for entry in entries for path in entry.modules)
    outermost = [name for name in matched if not any(name != other and is_inside(name, other) for other in matched)]
    tied = [path for path in owners if not any(is_inside(path, outer) for outer in outermost)]
    return (*outermost, *tied), tuple(entry.name for entry in entries)
