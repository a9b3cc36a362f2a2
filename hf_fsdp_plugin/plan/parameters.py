"""Checks the dtypes and frozen parameters of each unit, and splits FSDP1 units in which parameters differ.

FSDP checks a unit only at the first step. FSDP1 flattens the parameters of a unit into one tensor. That tensor has one
dtype. Without ``use_orig_params`` it is also the parameter that the optimizer updates, so it is either frozen or
trainable. The modules with the other parameters of a unit (LoRA adapters in frozen layers, fp32 norms among quantized
weights) become units of their own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

import torch
from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import DTYPES, PrecisionPlan, ProblemCollector, UnitPlan
from hf_fsdp_plugin.plan.modules import ModuleTree, ParameterEntry, class_names
from hf_fsdp_plugin.plan.names import is_inside
from hf_fsdp_plugin.text import format_dtype, format_names, plural
from hf_fsdp_plugin.torch_private.modules import casts_itself

_Violation = tuple[UnitPlan, str]
"""A unit that violates a rule, and the details for the message."""
_Owned = Sequence[tuple[UnitPlan, list[ParameterEntry]]]
"""The units, and the floating-point parameters of each."""


def check_parameters(
    tree: ModuleTree, units: tuple[UnitPlan, ...], precision: PrecisionPlan, problems: ProblemCollector
) -> None:
    """Report units that the backend cannot create, and parameters that cannot be sharded."""
    entries = {entry.name: entry for entry in tree.parameters}
    _check_kinds([entry for entry in tree.parameters if not entry.ignored], precision, problems)
    owned = [(unit, [entries[name] for name in unit.parameters if entries[name].is_floating]) for unit in units]
    _check_dtypes(owned, precision, problems)
    spec = problems.spec
    if spec.fsdp.version == 1 and not spec.params.use_orig:
        _check_requires_grad(owned, problems)
    if trainable := [entry for entry in tree.parameters if entry.ignored and entry.parameter.requires_grad]:
        message = f"{plural(len(trainable), 'trainable parameter is', 'trainable parameters are')} not sharded: "
        message += f"{_names(trainable)}. FSDP does not reduce their gradients, so the plugin averages them over all "
        message += "ranks after each backward."
        problems.add("FSDP-N223", "wrap.ignored_modules", message)


def _names(entries: Iterable[ParameterEntry]) -> str:
    return format_names([entry.name for entry in entries])


def _check_kinds(sharded: Sequence[ParameterEntry], precision: PrecisionPlan, problems: ProblemCollector) -> None:
    """Report parameters that FSDP cannot shard: integers, packed weights, and own all-gathers."""
    floating = [entry for entry in sharded if entry.is_floating]
    if integers := [entry for entry in sharded if not entry.is_floating]:
        dtypes = sorted({format_dtype(entry.parameter.dtype) for entry in integers})
        sizes: Counter[torch.dtype] = Counter()
        for entry in floating:
            sizes[entry.parameter.dtype] += entry.parameter.numel()
        usual = sizes.most_common(1)[0][0] if sizes else torch.bfloat16
        # bitsandbytes packs two 4-bit weights into each byte of a tensor of any dtype, but has no choice for 8 bits.
        storage = f"bnb_4bit_quant_storage={DTYPES.get(precision.param) or usual}"
        message = "FSDP shards only floating-point parameters, but "
        message += f"{plural(len(integers), 'parameter has', 'parameters have')} another dtype ({', '.join(dtypes)}), "
        message += f"as quantized weights do: {_names(integers)}."
        fix = f"Load it with BitsAndBytesConfig(load_in_4bit=True, {storage}), or exclude the modules with "
        fix += "fsdp_ignored_modules."
        problems.add("FSDP-E220", None, message, fix)
    # Packed 4-bit weights: a cast changes their bytes.
    compute = DTYPES.get(precision.param)
    packed = [entry for entry in floating if getattr(entry.parameter, "quant_state", None) is not None]
    stored = [format_dtype(entry.parameter.dtype) for entry in packed if entry.parameter.dtype != compute]
    if compute is not None and stored:
        message = f"the bytes of {plural(len(packed), 'quantized weight')} are stored in {stored[0]} tensors, and "
        message += f"mixed precision would cast them to {precision.param}: {_names(packed)}."
        fix = f"Set bnb_4bit_quant_storage={compute}, or mixed_precision to the dtype {stored[0]} or no."
        problems.add("FSDP-E266", "precision.param", message, fix)
    # Weights that convert themselves in FSDP2's all-gather, as torchao's do for fp8: copies would lose that.
    if own := [entry for entry in sharded if casts_itself(entry.parameter)]:
        message = f"{plural(len(own), 'weight')} of class {type(own[0].parameter).__name__} would be converted in the "
        message += f"all-gather, which is not supported: {_names(own)}."
        fix = "Set mixed_precision: fp8 instead of calling convert_to_float8_training, or call it with "
        fix += "Float8LinearConfig(enable_fsdp_float8_all_gather=False)."
        problems.add("FSDP-E121", None, message, fix)


def _check_dtypes(owned: _Owned, precision: PrecisionPlan, problems: ProblemCollector) -> None:
    """Report units with several dtypes. FSDP1 requires one dtype per unit, FSDP2 one for its trainable parameters."""
    version = problems.spec.fsdp.version
    violations: list[_Violation] = []
    main_dtypes: dict[str, None] = {}
    for unit, entries in owned:
        groups: dict[torch.dtype, list[ParameterEntry]] = defaultdict(list)
        for entry in entries:
            if version == 1 or entry.parameter.requires_grad:
                groups[precision.stored_dtype(entry.parameter)].append(entry)
        if len(groups) < 2:
            continue
        by_size = sorted(groups.items(), key=lambda item: -sum(e.parameter.numel() for e in item[1]))
        main, *others = ((format_dtype(dtype), _names(group)) for dtype, group in by_size)
        main_dtypes[main[0]] = None
        listed = "; ".join(f"{dtype}: {names}" for dtype, names in others)
        violations.append((unit, f"most parameters are {main[0]}, the others are {listed}"))
    cast = f"cast all parameters of a unit to {' or '.join(main_dtypes)}"
    if version == 1:
        rule, setting = "FSDP1 requires one dtype for all parameters of a unit", "fsdp.version"
        fix = f"Set fsdp_version: 2, {cast} before training, or wrap smaller classes."
    else:
        rule, setting = "FSDP2 requires one dtype for all trainable parameters of a unit", "precision.param"
        fix = f"Set mixed_precision: bf16, which stores trainable parameters in float32, or {cast}."
    _report_violations(problems, "FSDP-E221", setting, rule, violations, fix)


def _check_requires_grad(owned: _Owned, problems: ProblemCollector) -> None:
    violations: list[_Violation] = []
    for unit, entries in owned:
        frozen = [entry for entry in entries if not entry.parameter.requires_grad]
        trainable = [entry for entry in entries if entry.parameter.requires_grad]
        if frozen and trainable:
            counts = f"{len(frozen)} parameters are frozen ({_names(frozen)}) and {len(trainable)} are trainable"
            violations.append((unit, f"{counts} ({_names(trainable)})"))
    rule = "FSDP1 with fsdp_use_orig_params: false requires that all parameters of a unit are frozen, or that none is"
    fix = "Set fsdp_use_orig_params: true, or fsdp_version: 2."
    _report_violations(problems, "FSDP-E222", "params.use_orig", rule, violations, fix)


def _report_violations(
    problems: ProblemCollector, code: str, setting: str, rule: str, violations: list[_Violation], fix: str
) -> None:
    """Report all units that violate a rule as one problem, with the details of the first unit."""
    if violations:
        unit, details = violations[0]
        count = plural(len(violations), "unit breaks", "units break")
        listed = format_names([found.name or "the root unit" for found, _ in violations])
        problems.add(code, setting, f"{rule}. {count} this rule: {listed}. In {unit.label}, {details}.", fix)


_READS_CHILDREN: Final = frozenset({"MultiheadAttention", "ParamWrapper", "TrainableTokensLayer"})
"""Classes that read the weights of their children instead of calling them, so that these cannot be units of FSDP1."""
_CALLS_BASE_LAYER: Final = frozenset({"IA3Layer", "LoraLayer", "LycorisLayer", "VeraLayer"})
"""PEFT's classes with bare parameters that call their ``base_layer``. Other classes of PEFT read its weight instead."""
_MAGNITUDE: Final = "lora_magnitude_vector"
"""DoRA's attribute in a LoRA layer, which then reads the weight of its base layer."""


def reads_base_layer(layer: nn.Module) -> bool:
    """Return whether a layer of PEFT reads the weight of its base layer instead of calling it, as DoRA does."""
    return class_names(layer).isdisjoint(_CALLS_BASE_LAYER) or len(getattr(layer, _MAGNITUDE, ())) > 0


def modules_of_other_kinds(
    tree: ModuleTree, entries: Sequence[ParameterEntry], precision: PrecisionPlan, use_orig: bool
) -> list[str]:
    """Return the modules of a unit of FSDP1 to wrap as units of their own, so that every unit has one kind.

    The kind of a parameter is the dtype in which FSDP1 stores it, and ``requires_grad`` without ``use_orig``. The kind
    with the most elements stays in the unit. The others must be alone in modules that are called, as those of PEFT's
    ``fsdp_auto_wrap_policy`` are. Returns no modules if the unit has one kind, or if that is not so.

    Args:
        entries: the parameters of the unit, without those of units inside it.
    """

    def kind(entry: ParameterEntry) -> Hashable:
        return precision.stored_dtype(entry.parameter), use_orig or entry.parameter.requires_grad

    sizes: Counter[Hashable] = Counter()
    for entry in entries:
        sizes[kind(entry)] += entry.parameter.numel()
    others = dict.fromkeys(entry.home for entry in entries if kind(entry) != sizes.most_common(1)[0][0])
    sharing = {path for entry in entries for path in entry.sharing_modules}

    def can_wrap(path: str) -> bool:
        parent, _, attribute = path.rpartition(".")
        # Lists and dicts of modules or parameters have no forward. DoRA reads the weight of its base layer.
        is_called = type(tree.modules[path]).forward is not nn.Module.forward and attribute != "base_layer"
        is_called &= class_names(tree.modules[parent]).isdisjoint(_READS_CHILDREN) and path not in sharing
        return is_called and len({kind(entry) for entry in entries if is_inside(entry.home, path)}) == 1

    return list(others) if all(map(can_wrap, others)) else []
