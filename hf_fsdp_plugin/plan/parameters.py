"""Checks the dtypes and frozen parameters of each unit, which FSDP checks only at the first step."""

from __future__ import annotations

from collections import Counter, defaultdict

import torch

from hf_fsdp_plugin.plan.model import PrecisionPlan
from hf_fsdp_plugin.plan.modules import ModuleTree, ParameterEntry
from hf_fsdp_plugin.plan.problem_collector import ProblemCollector
from hf_fsdp_plugin.plan.split import inseparable, kind_of
from hf_fsdp_plugin.plan.units import UnitPlan
from hf_fsdp_plugin.spec.fsdp_spec import Version
from hf_fsdp_plugin.text import format_names, plural

_COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Violation = tuple[UnitPlan, str]
"""A unit that violates a rule, and the details for the message."""


def check_parameters(
    tree: ModuleTree,
    units: tuple[UnitPlan, ...],
    precision: PrecisionPlan,
    version: Version,
    use_orig: bool,
    problems: ProblemCollector,
) -> None:
    """Report units that the backend cannot create, and parameters that cannot be sharded."""
    entries = {entry.name: entry for entry in tree.parameters}
    _check_integers(tree, precision, problems)
    _check_complex(tree, problems)
    _check_packed(tree, precision, problems)
    _check_own_gather(tree, problems)
    owned = {u.name: [e for name in u.parameters if _is_floating(e := entries[name])] for u in units}
    _check_dtypes(tree, units, owned, precision, version, problems)
    if version == 1 and not use_orig:
        _check_requires_grad(tree, units, owned, problems)
    _check_ignored(tree, problems)


def _is_floating(entry: ParameterEntry) -> bool:
    return entry.parameter.is_floating_point()


def _check_integers(tree: ModuleTree, precision: PrecisionPlan, problems: ProblemCollector) -> None:
    integers = [e for e in tree.parameters if not (e.ignored or _is_floating(e) or e.parameter.is_complex())]
    if integers:
        dtypes = sorted({str(entry.parameter.dtype).removeprefix("torch.") for entry in integers})
        # bitsandbytes packs two 4-bit weights into each byte of a tensor of any dtype, but has no choice for 8 bits.
        storage = f"bnb_4bit_quant_storage={_COMPUTE_DTYPES.get(precision.param) or _model_dtype(tree)}"
        problems.add(
            "FSDP-E220",
            None,
            "FSDP shards only floating-point parameters, but "
            f"{plural(len(integers), 'parameter has', 'parameters have')} an integer dtype ({', '.join(dtypes)}), as "
            f"quantized weights do: {format_names([entry.name for entry in integers])}.",
            f"Load it with BitsAndBytesConfig(load_in_4bit=True, {storage}), or exclude the modules with "
            "fsdp_ignored_modules.",
        )


def _check_complex(tree: ModuleTree, problems: ProblemCollector) -> None:
    names = [entry.name for entry in tree.parameters if entry.parameter.is_complex() and not entry.ignored]
    if names:
        problems.add(
            "FSDP-E224",
            None,
            f"FSDP shards only real parameters, but {plural(len(names), 'parameter is', 'parameters are')} complex: "
            f"{format_names(names)}.",
            "Keep their modules whole on every rank with fsdp_ignored_modules, or store torch.view_as_real(weight) and "
            "use torch.view_as_complex in the forward.",
        )


def _model_dtype(tree: ModuleTree) -> torch.dtype:
    """Return the dtype of most parameters that are not quantized."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in tree.parameters:
        if not entry.ignored and _is_floating(entry):
            sizes[entry.parameter.dtype] += entry.parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else torch.bfloat16


def _check_packed(tree: ModuleTree, precision: PrecisionPlan, problems: ProblemCollector) -> None:
    """Report packed 4-bit weights that mixed precision would cast: a cast changes the bytes."""
    compute = _COMPUTE_DTYPES.get(precision.param)
    packed = [
        entry
        for entry in tree.parameters
        if getattr(entry.parameter, "quant_state", None) is not None and not entry.ignored and _is_floating(entry)
    ]
    if compute is None or all(entry.parameter.dtype == compute for entry in packed):
        return
    stored = str(next(e.parameter.dtype for e in packed if e.parameter.dtype != compute)).removeprefix("torch.")
    problems.add(
        "FSDP-E266",
        "precision.param",
        f"the bytes of {plural(len(packed), 'quantized weight')} are stored in {stored} tensors, and mixed precision "
        f"would cast them to {precision.param}: {format_names([entry.name for entry in packed])}.",
        f"Set bnb_4bit_quant_storage={compute}, or mixed_precision to the dtype {stored} or no.",
    )


def _check_own_gather(tree: ModuleTree, problems: ProblemCollector) -> None:
    """Report weights that convert themselves in FSDP2's all-gather, as torchao's do for fp8: copies would lose that."""
    found = [
        entry for entry in tree.parameters if hasattr(entry.parameter, "fsdp_pre_all_gather") and not entry.ignored
    ]
    if found:
        problems.add(
            "FSDP-E121",
            None,
            f"{plural(len(found), 'weight')} of class {type(found[0].parameter).__name__} would be converted in the "
            f"all-gather, which is not supported: {format_names([entry.name for entry in found])}.",
            "Call convert_to_float8_training with Float8LinearConfig(enable_fsdp_float8_all_gather=False), or exclude "
            "the modules with fsdp_ignored_modules.",
        )


def _check_dtypes(
    tree: ModuleTree,
    units: tuple[UnitPlan, ...],
    owned: dict[str, list[ParameterEntry]],
    precision: PrecisionPlan,
    version: Version,
    problems: ProblemCollector,
) -> None:
    """Report units with several dtypes. FSDP1 requires one dtype per unit, FSDP2 one for its trainable parameters."""
    violations: list[Violation] = []
    main_dtypes: dict[str, None] = {}
    for unit in units:
        groups: dict[torch.dtype, list[ParameterEntry]] = defaultdict(list)
        for entry in owned[unit.name]:
            is_trainable = entry.parameter.requires_grad
            if version == 1 or is_trainable:
                is_cast = is_trainable and precision.master == "fp32"
                groups[torch.float32 if is_cast else entry.parameter.dtype].append(entry)
        if len(groups) < 2:
            continue
        names = {
            str(dtype).removeprefix("torch."): [entry.name for entry in group]
            for dtype, group in sorted(groups.items(), key=lambda item: -sum(e.parameter.numel() for e in item[1]))
        }
        main, *others = names
        main_dtypes[main] = None
        listed = "; ".join(f"{dtype}: {format_names(names[dtype])}" for dtype in others)
        details = f"most parameters are {main}, the others are {listed}"
        if version == 1:
            details += _because(inseparable(tree, owned[unit.name], lambda entry: kind_of(entry, precision, True)))
        violations.append((unit, details))
    cast = f"cast all parameters of a unit to {' or '.join(main_dtypes)}"
    if version == 1:
        rule, setting = "FSDP1 requires one dtype for all parameters of a unit", "fsdp.version"
        fix = f"Set fsdp_version: 2, {cast} before training, or wrap smaller classes."
    else:
        rule, setting = "FSDP2 requires one dtype for all trainable parameters of a unit", "precision.param"
        fix = f"Set mixed_precision: bf16, which stores trainable parameters in float32, or {cast}."
    _report_violations(problems, "FSDP-E221", setting, rule, violations, fix)


def _check_requires_grad(
    tree: ModuleTree, units: tuple[UnitPlan, ...], owned: dict[str, list[ParameterEntry]], problems: ProblemCollector
) -> None:
    violations: list[Violation] = []
    for unit in units:
        frozen = [entry.name for entry in owned[unit.name] if not entry.parameter.requires_grad]
        trainable = [entry.name for entry in owned[unit.name] if entry.parameter.requires_grad]
        if frozen and trainable:
            counts = f"{len(frozen)} parameters are frozen ({format_names(frozen)}) and {len(trainable)} are trainable"
            why = _because(inseparable(tree, owned[unit.name], lambda entry: entry.parameter.requires_grad))
            violations.append((unit, f"{counts} ({format_names(trainable)}){why}"))
    _report_violations(
        problems,
        "FSDP-E222",
        "params.use_orig",
        "FSDP1 with fsdp_use_orig_params: false requires that all parameters of a unit are frozen, or that none is",
        violations,
        "Set fsdp_use_orig_params: true, or fsdp_version: 2.",
    )


def _because(reason: str | None) -> str:
    """Return the reason why the plan could not split a unit, as the end of a sentence."""
    return f"; they cannot be units of their own, because {reason}" if reason else ""


def _report_violations(
    problems: ProblemCollector, code: str, setting: str, rule: str, violations: list[Violation], fix: str
) -> None:
    """Report all units that violate a rule as one problem, with the details of the first unit."""
    if violations:
        unit, details = violations[0]
        count = plural(len(violations), "unit breaks", "units break")
        listed = format_names([found.name or "the root unit" for found, _ in violations])
        problems.add(code, setting, f"{rule}. {count} this rule: {listed}. In {unit.label}, {details}.", fix)


def _check_ignored(tree: ModuleTree, problems: ProblemCollector) -> None:
    trainable = [entry.name for entry in tree.parameters if entry.ignored and entry.parameter.requires_grad]
    if trainable:
        problems.add(
            "FSDP-N223",
            "wrap.ignored_modules",
            f"{plural(len(trainable), 'trainable parameter is', 'trainable parameters are')} not sharded: "
            f"{format_names(trainable)}. FSDP does not reduce their gradients, so the plugin averages them over all "
            "ranks after each backward.",
        )
