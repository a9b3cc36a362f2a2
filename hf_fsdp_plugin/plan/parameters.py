"""Dtypes and frozen parameters, unit by unit: what FSDP would refuse at the first step is refused here, with names."""

from __future__ import annotations

from collections import defaultdict

import torch

from hf_fsdp_plugin.plan.complaints import Complaints, shortened
from hf_fsdp_plugin.plan.model import PrecisionPlan
from hf_fsdp_plugin.plan.modules import ModelIndex, ParameterEntry
from hf_fsdp_plugin.plan.units import UnitPlan
from hf_fsdp_plugin.spec.model import Version

_MASTERS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_QUANTIZED_FIX = (
    "Quantize with bnb_4bit_quant_storage set to a floating dtype (torch.bfloat16), or leave those modules out with "
    "fsdp_ignored_modules."
)


def judge_parameters(
    index: ModelIndex,
    units: tuple[UnitPlan, ...],
    precision: PrecisionPlan,
    version: Version,
    use_orig: bool,
    complaints: Complaints,
) -> None:
    """Complain about units that the backend could not make, and about parameters that cannot be sharded at all."""
    entries = {entry.name: entry for entry in index.parameters}
    _judge_kinds(index, complaints)
    for unit in units:
        owned = [entries[name] for name in unit.parameters if entries[name].parameter.is_floating_point()]
        checked = owned if version == 1 else [entry for entry in owned if entry.parameter.requires_grad]
        _judge_dtypes(unit, checked, precision, version, complaints)
        if version == 1 and not use_orig:
            _judge_requires_grad(unit, owned, complaints)
    _judge_ignored(index, complaints)


def planned_dtype(entry: ParameterEntry, precision: PrecisionPlan) -> torch.dtype:
    """Trainable parameters are kept in the master dtype; frozen ones as they are."""
    parameter = entry.parameter
    if precision.master == "unchanged" or not parameter.requires_grad or not parameter.is_floating_point():
        return parameter.dtype
    return _MASTERS[precision.master]


def _judge_kinds(index: ModelIndex, complaints: Complaints) -> None:
    kept = [entry for entry in index.parameters if not entry.ignored]
    integers = [entry for entry in kept if not (entry.parameter.is_floating_point() or entry.parameter.is_complex())]
    if integers:
        dtypes = sorted({str(entry.parameter.dtype).removeprefix("torch.") for entry in integers})
        complaints.error(
            None,
            f"{len(integers)} parameters hold integers ({', '.join(dtypes)}), as quantized weights do, and FSDP shards "
            f"floating-point ones only: {shortened(entry.name for entry in integers)}.",
            _QUANTIZED_FIX,
        )


def _judge_dtypes(
    unit: UnitPlan, entries: list[ParameterEntry], precision: PrecisionPlan, version: Version, complaints: Complaints
) -> None:
    groups: dict[torch.dtype, list[ParameterEntry]] = defaultdict(list)
    for entry in entries:
        groups[planned_dtype(entry, precision)].append(entry)
    if len(groups) < 2:
        return
    by_size = sorted(groups.items(), key=lambda item: -sum(entry.parameter.numel() for entry in item[1]))
    main = str(by_size[0][0]).removeprefix("torch.")
    offenders = "; ".join(
        f"{str(dtype).removeprefix('torch.')}: {shortened(entry.name for entry in group)}"
        for dtype, group in by_size[1:]
    )
    if version == 1:
        complaints.error(
            "fsdp.version",
            f"FSDP1 flattens a unit and needs uniform dtype, but {unit.label} is {main} except for {offenders}.",
            f"Set fsdp_version: 2, cast them to {main} before training, or name finer classes to wrap.",
        )
    else:
        complaints.error(
            "precision.param",
            f"FSDP2 needs one dtype for the trainable parameters of a unit (uniform dtype), but {unit.label} is "
            f"{main} except for {offenders}.",
            f"Set mixed_precision: bf16 (trainable parameters are then kept in float32), or cast them to {main}.",
        )


def _judge_requires_grad(unit: UnitPlan, entries: list[ParameterEntry], complaints: Complaints) -> None:
    frozen = [entry.name for entry in entries if not entry.parameter.requires_grad]
    trainable = [entry.name for entry in entries if entry.parameter.requires_grad]
    if frozen and trainable:
        complaints.error(
            "params.use_orig",
            f"FSDP1 without original parameters needs uniform requires_grad in a unit, but in {unit.label} "
            f"{len(frozen)} parameters are frozen ({shortened(frozen, 3)}) and {len(trainable)} train "
            f"({shortened(trainable, 3)}).",
            "Set fsdp_use_orig_params: true, or fsdp_version: 2.",
        )


def _judge_ignored(index: ModelIndex, complaints: Complaints) -> None:
    trainable = [entry.name for entry in index.parameters if entry.ignored and entry.parameter.requires_grad]
    if trainable:
        complaints.note(
            "wrap.ignored_modules",
            f"{len(trainable)} trainable parameters stay whole on every rank ({shortened(trainable)}); FSDP does not "
            "reduce their gradients, so they are averaged after each backward.",
        )
