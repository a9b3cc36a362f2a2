"""Checks the dtypes and frozen parameters of each unit, and splits FSDP1 units in which they differ.

FSDP checks a unit only at the first step. FSDP1 flattens the parameters of a unit into one tensor. That tensor has one
dtype. Without ``use_orig_params`` it is also the parameter that the optimizer updates, so it is either frozen or
trainable. The modules with the other parameters of a unit (LoRA adapters in frozen layers, fp32 norms among quantized
weights) become units of their own, as ``peft.utils.other.fsdp_auto_wrap_policy`` does for leaf modules with a trainable
weight.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Final

import torch
from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import PrecisionPlan, ProblemCollector, UnitPlan
from hf_fsdp_plugin.plan.modules import ModuleTree, ParameterEntry, class_names
from hf_fsdp_plugin.plan.names import ancestors, common_path, is_inside, parent_of
from hf_fsdp_plugin.spec.fsdp_spec import Version
from hf_fsdp_plugin.text import format_dtype, format_names, plural

_COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_Violation = tuple[UnitPlan, str]
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
    owned = {unit.name: [entries[name] for name in unit.parameters if entries[name].is_floating] for unit in units}
    _check_dtypes(tree, units, owned, precision, version, problems)
    if version == 1 and not use_orig:
        _check_requires_grad(tree, units, owned, problems)
    _check_ignored(tree, problems)


def _check_integers(tree: ModuleTree, precision: PrecisionPlan, problems: ProblemCollector) -> None:
    integers = [e for e in tree.parameters if not (e.ignored or e.is_floating or e.parameter.is_complex())]
    if integers:
        dtypes = sorted({format_dtype(entry.parameter.dtype) for entry in integers})
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
        if not entry.ignored and entry.is_floating:
            sizes[entry.parameter.dtype] += entry.parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else torch.bfloat16


def _check_packed(tree: ModuleTree, precision: PrecisionPlan, problems: ProblemCollector) -> None:
    """Report packed 4-bit weights that mixed precision would cast: a cast changes the bytes."""
    compute = _COMPUTE_DTYPES.get(precision.param)
    packed = [
        entry
        for entry in tree.parameters
        if getattr(entry.parameter, "quant_state", None) is not None and not entry.ignored and entry.is_floating
    ]
    if compute is None or all(entry.parameter.dtype == compute for entry in packed):
        return
    stored = format_dtype(next(e.parameter.dtype for e in packed if e.parameter.dtype != compute))
    message = (
        f"the bytes of {plural(len(packed), 'quantized weight')} are stored in {stored} tensors, and mixed precision "
        f"would cast them to {precision.param}: {format_names([entry.name for entry in packed])}."
    )
    fix = f"Set bnb_4bit_quant_storage={compute}, or mixed_precision to the dtype {stored} or no."
    problems.add("FSDP-E266", "precision.param", message, fix)


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
    violations: list[_Violation] = []
    main_dtypes: dict[str, None] = {}
    for unit in units:
        groups: dict[torch.dtype, list[ParameterEntry]] = defaultdict(list)
        for entry in owned[unit.name]:
            if version == 1 or entry.parameter.requires_grad:
                groups[entry.stored_dtype(precision.master)].append(entry)
        if len(groups) < 2:
            continue
        names = {
            format_dtype(dtype): [entry.name for entry in group]
            for dtype, group in sorted(groups.items(), key=lambda item: -sum(e.parameter.numel() for e in item[1]))
        }
        main, *others = names
        main_dtypes[main] = None
        listed = "; ".join(f"{dtype}: {format_names(names[dtype])}" for dtype in others)
        details = f"most parameters are {main}, the others are {listed}"
        if version == 1:
            details += _reason_clause(
                reason_inseparable(tree, owned[unit.name], kind_in_fsdp1(precision, use_orig=True))
            )
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
    violations: list[_Violation] = []
    for unit in units:
        frozen = [entry.name for entry in owned[unit.name] if not entry.parameter.requires_grad]
        trainable = [entry.name for entry in owned[unit.name] if entry.parameter.requires_grad]
        if frozen and trainable:
            counts = f"{len(frozen)} parameters are frozen ({format_names(frozen)}) and {len(trainable)} are trainable"
            why = _reason_clause(
                reason_inseparable(tree, owned[unit.name], lambda entry: entry.parameter.requires_grad)
            )
            violations.append((unit, f"{counts} ({format_names(trainable)}){why}"))
    _report_violations(
        problems,
        "FSDP-E222",
        "params.use_orig",
        "FSDP1 with fsdp_use_orig_params: false requires that all parameters of a unit are frozen, or that none is",
        violations,
        "Set fsdp_use_orig_params: true, or fsdp_version: 2.",
    )


def _reason_clause(reason: str | None) -> str:
    """Return the reason why the plan could not split a unit, as the end of a sentence."""
    return f"; they cannot be units of their own, because {reason}" if reason else ""


def _report_violations(
    problems: ProblemCollector, code: str, setting: str, rule: str, violations: list[_Violation], fix: str
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
        message = (
            f"{plural(len(trainable), 'trainable parameter is', 'trainable parameters are')} not sharded: "
            f"{format_names(trainable)}. FSDP does not reduce their gradients, so the plugin averages them over all "
            "ranks after each backward."
        )
        problems.add("FSDP-N223", "wrap.ignored_modules", message)


_READS_CHILDREN: Final = frozenset({"MultiheadAttention", "ParamWrapper", "TrainableTokensLayer"})
"""Classes that read the weights of their children instead of calling them: torch's attention, and two of PEFT's.

FSDP1 gathers a unit when its module is called, so these children cannot be units."""
_CALLS_BASE_LAYER: Final = frozenset({"IA3Layer", "LoraLayer", "LycorisLayer", "VeraLayer"})
"""PEFT's classes with bare parameters that call their ``base_layer``. Other classes of PEFT read its weight instead."""
_MAGNITUDE: Final = "lora_magnitude_vector"
"""DoRA's attribute in a LoRA layer, which then reads the weight of its base layer."""


KindOf = Callable[[ParameterEntry], Hashable]
"""Returns what all parameters of a unit must have in common: dtype, ``requires_grad`` or both."""


def kind_in_fsdp1(precision: PrecisionPlan, use_orig: bool) -> KindOf:
    """Return a function for the dtype in which FSDP1 stores a parameter, and ``requires_grad`` if it matters."""
    return lambda entry: (entry.stored_dtype(precision.master), None if use_orig else entry.parameter.requires_grad)


def modules_to_split_off(
    tree: ModuleTree, unit: str, entries: Sequence[ParameterEntry], kind: KindOf
) -> tuple[str, ...]:
    """Return the modules inside ``unit`` to wrap as separate units, so that every unit has parameters of one kind.

    The kind with the most elements stays in the unit if that is possible. Returns no modules if the unit has one kind
    already, or if no choice of modules separates the kinds.

    Args:
        unit: name of the unit's module; empty for the root.
        entries: the parameters of the unit, without those of units inside it.
    """
    return tuple(_Splitter(tree, entries, kind).modules_inside(unit))


def reason_inseparable(tree: ModuleTree, entries: Sequence[ParameterEntry], kind: KindOf) -> str | None:
    """Return a reason why parameters of several kinds cannot be in separate units; ``None`` for no specific reason."""
    splitter = _Splitter(tree, entries, kind)
    for path, own in splitter.own.items():
        if len({kind(entry) for entry in own}) > 1:
            return f"{type(tree.modules[path]).__name__} {path!r} itself has parameters of both kinds"
    for path in splitter.kinds:
        if path and len(splitter.kinds[path]) > 1 and not splitter.may_divide(path):
            return f"{type(tree.modules[path]).__name__} {path!r} reads weights of the modules inside it"
    return None


class _Splitter:
    """Searches the modules to wrap inside one unit.

    Attributes:
        own: module -> the parameters that are registered in it. A shared parameter is listed in the innermost module
            that contains all modules that use it.
        kinds: module -> kind -> number of elements of that kind in the module and in the modules inside it.
    """

    def __init__(self, tree: ModuleTree, entries: Sequence[ParameterEntry], kind: KindOf) -> None:
        self._tree, self._kind = tree, kind
        self.own: dict[str, list[ParameterEntry]] = defaultdict(list)
        self.kinds: dict[str, Counter[Hashable]] = defaultdict(Counter)
        self._children: dict[str, dict[str, None]] = defaultdict(dict)
        self._sharing: set[str] = set()
        self._found: dict[tuple[str, Hashable], list[str] | None] = {}
        for entry in entries:
            home = common_path(entry.modules)
            self.own[home].append(entry)
            path = home
            for path in (*ancestors(home), ""):
                self.kinds[path][kind(entry)] += entry.parameter.numel()
                if path:
                    self._children[parent_of(path)][path] = None
            for module in entry.modules:
                for path in ancestors(module):
                    if path == home:
                        break
                    self._sharing.add(path)

    def modules_inside(self, unit: str) -> list[str]:
        if len(self.kinds[unit]) < 2:
            return []
        choices = [
            found for kind in self._kinds_by_size(unit) if (found := self._modules_leaving(unit, kind)) is not None
        ]
        # A layer without parameters of its own would not be a unit, and would not be checkpointed.
        return next((found for found in choices if self._leaves_parameters(found)), choices[0] if choices else [])

    def _leaves_parameters(self, split: Collection[str]) -> bool:
        """Whether parameters remain outside the modules to wrap."""
        return any(entries and not any(is_inside(home, name) for name in split) for home, entries in self.own.items())

    def may_divide(self, path: str) -> bool:
        """Whether the modules inside a module may be units. They must be called, not only have their weights read."""
        classes = class_names(self._tree.modules[path])
        if not classes.isdisjoint(_READS_CHILDREN):
            return False
        if not self.kinds.get(f"{path}.base_layer") or not classes.isdisjoint(_CALLS_BASE_LAYER):
            return True
        # A layer of PEFT. Its adapters are called if they are modules with a forward.
        inside = [home for home in self.own if home.startswith(f"{path}.") and self.own[home]]
        return all(self._is_callable(home) for home in inside)

    def _is_callable(self, path: str) -> bool:
        """Whether a module has a forward. Lists and dicts of modules or parameters have none."""
        module = self._tree.modules[path]
        return type(module).forward is not nn.Module.forward

    def _can_wrap(self, path: str) -> bool:
        parent, _, attribute = path.rpartition(".")
        if attribute == "base_layer" and self.kinds.get(f"{parent}.{_MAGNITUDE}"):
            return False  # DoRA reads its weight
        return path not in self._sharing and self._is_callable(path)

    def _kinds_by_size(self, path: str) -> list[Hashable]:
        return [kind for kind, _ in self.kinds[path].most_common()]

    def _modules_leaving(self, path: str, kind: Hashable) -> list[str] | None:
        """Return the modules to wrap so that only parameters of ``kind`` remain in ``path``; ``None`` if impossible."""
        key = path, kind
        if key not in self._found:
            self._found[key] = self._search_leaving(path, kind)
        return self._found[key]

    def _search_leaving(self, path: str, kind: Hashable) -> list[str] | None:
        if any(self._kind(entry) != kind for entry in self.own.get(path, ())):
            return None
        found: list[str] = []
        for child in self._children[path]:
            inner = self._modules_covering(child, kind)
            if inner is None or (inner and not self.may_divide(path)):
                return None
            found += inner
        return found

    def _modules_covering(self, child: str, kind: Hashable) -> list[str] | None:
        """Return the modules to wrap, ``child`` or modules inside it, so that only ``kind`` remains around them."""
        kinds = self._kinds_by_size(child)
        if kinds == [kind]:
            return []
        can_wrap = self._can_wrap(child)
        if can_wrap and len(kinds) == 1:
            return [child]
        inner = self._modules_leaving(child, kind)
        if inner is not None or not can_wrap:
            return inner
        for other in kinds:
            inner = self._modules_leaving(child, other) if other != kind else None
            if inner is not None:
                return [*inner, child]
        return None
