"""The modules that the wrap policy selects as units.

The wrap settings were written for the model that is trained. They may not fit a further model of another architecture,
such as a reference, teacher or reward model: :func:`spec_of_further_model` replaces them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import ProblemCollector
from hf_fsdp_plugin.plan.modules import ModuleTree, class_names, no_split_classes, post_order
from hf_fsdp_plugin.spec.fsdp_spec import ActivationSection, FsdpSpec
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.torch_private.modules import CHECKPOINTED_ATTRIBUTE
from hf_fsdp_plugin.vocabulary import nearest_word

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def policy_modules(tree: ModuleTree, problems: ProblemCollector) -> tuple[str, ...]:
    """Return the first names of the modules that the policy selects, children before parents, without the root."""
    wrap = problems.spec.wrap
    if wrap.policy == "size":
        return _by_size(tree, wrap.min_num_params)
    if wrap.policy == "none":
        return ()
    classes = (_given_classes if wrap.classes else _own_classes)(tree, problems)
    selected: dict[str, None] = {}
    for name, module in tree.named():
        if name and id(module) not in tree.ignored and not classes.isdisjoint(class_names(module)):
            parent, _, attribute = name.rpartition(".")
            if attribute == CHECKPOINTED_ATTRIBUTE and parent:  # the checkpoint wrapper around the module is the unit
                name = tree.first_names[id(tree.modules[parent])]
            selected[name] = None
    return post_order(selected)


def _given_classes(tree: ModuleTree, problems: ProblemCollector) -> set[str]:
    """Return the classes of the spec that the model has, and report the others."""
    present, given = tree.present_classes(), problems.spec.wrap.classes
    matched = [name for name in given if name in present]
    if not (absent := [name for name in dict.fromkeys(given) if name not in present]):
        return set(matched)
    counts = tree.class_counts()
    own = [name for name in no_split_classes(tree.model) if name in counts] or tree.repeated_classes()
    near = list(dict.fromkeys(filter(None, (nearest_word(name, counts, cutoff=0.7) for name in absent))))
    message = f"{type(tree.model).__name__} has no module of class {format_names([repr(name) for name in absent])}"
    if matched:
        message = f"{message}. Only modules of class {format_names(matched)} become units."
        fix = f"Did you mean {format_names(near)}?" if near else "Remove it, unless this config is for several models."
        problems.add("FSDP-W213", "wrap.classes", message, fix)
        return set(matched)
    message += f". It has {_counts_text(dict.fromkeys([*near, *own, *counts]), counts)}."
    classes = ",".join(near or own) or "a class of these"
    fix = f"Set fsdp_transformer_layer_cls_to_wrap: {classes}, or use SIZE_BASED_WRAP with fsdp_min_num_params."
    problems.add("FSDP-E214", "wrap.classes", message, fix)
    return set()


def _counts_text(names: Iterable[str], counts: Mapping[str, int]) -> str:
    """Return class names with counts: ``LlamaDecoderLayer ×30, LlamaMLP ×30 and 3 more``."""
    return format_names([f"{name} ×{counts[name]}" for name in names], 5) or "no modules with parameters"


def _own_classes(tree: ModuleTree, problems: ProblemCollector) -> set[str]:
    """Return the layer classes that the model declares, else those that it repeats."""
    declared = no_split_classes(tree.model)
    if matched := tree.present_classes().intersection(declared):
        return matched
    if repeated := tree.repeated_classes():
        counts = tree.class_counts()
        message = f"{type(tree.model).__name__} has none of the layer classes that it declares: "
        message += f"{format_names(declared) or 'none'}. Its repeated layers are units: "
        message += f"{_counts_text(repeated, counts)}."
        fix = "To wrap other layers, name them in fsdp_transformer_layer_cls_to_wrap. The model has "
        setting = "wrap.classes" if problems.spec.asked("wrap.classes") else "wrap.policy"
        problems.add("FSDP-N215", setting, message, f"{fix}{_counts_text(counts, counts)}.")
    return set(repeated)


def _by_size(tree: ModuleTree, threshold: int) -> tuple[str, ...]:
    ignored = {id(entry.parameter) for entry in tree.parameters if entry.ignored}
    selected: dict[int, None] = {}

    @cache
    def size(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if id(p) not in ignored)

    def select(module: nn.Module, is_root: bool) -> int:
        """Select units in ``module`` like torch's ``_recursive_wrap``, and return their number of parameters.

        As in torch's ``size_based_auto_wrap_policy``, lists are no units, because they are never called, and attention
        has none inside, because it reads the weights of its projections. torch makes units of lists of parameters,
        which nothing gathers.
        """
        if size(module) < threshold or isinstance(module, nn.MultiheadAttention):
            return 0
        inner = sum(select(child, False) for child in module.children() if id(child) not in tree.ignored)
        if not is_root and size(module) - inner >= threshold and not isinstance(module, _LISTS):
            selected[id(module)] = None
            return size(module)
        return inner

    select(tree.model, True)
    return tuple(tree.first_names[key] for key in selected)


def spec_of_further_model(spec: FsdpSpec, model: nn.Module, *, is_trained: bool) -> FsdpSpec:
    """Return ``spec`` with wrap settings that fit ``model``, and a warning for those that differ.

    Without a backward there are no activations to recompute, so a model that is not trained has no activation
    checkpointing.
    """
    wrap, name, tree = spec.wrap, type(model).__name__, ModuleTree(model)
    present, own = tree.present_classes(), tree.own_classes()
    largest = max((sum(p.numel() for p in child.parameters()) for child in model.children()), default=0)
    values: dict[str, Any] = {}
    problems = spec.problems
    if wrap.policy == "transformer" and present.isdisjoint(wrap.classes) and (wrap.classes or not own):
        values = {"wrap.policy": "transformer" if own else "none", "wrap.classes": ()}
        message = f"{name}, a further model, has no {format_names(wrap.classes or ['declared or repeated layers'])}."
        message += f" Its own layers are wrapped: {format_names(sorted(own))}." if own else " It is one unit."
        problems = (*problems, spec.problem("FSDP-W260", "wrap.classes", message))
    elif wrap.policy == "size" and largest < wrap.min_num_params:
        values = {"wrap.policy": "none", "wrap.min_num_params": 0}
        message = f"no module of {name}, a further model, has {wrap.min_num_params:,} parameters. It is one unit."
        problems = (*problems, spec.problem("FSDP-W260", "wrap.min_num_params", message))
    for setting in ("wrap.ignored_modules", "precision.fp32_modules"):
        pattern = spec.get(setting)
        if pattern and not any(re.fullmatch(pattern, name) for name, _ in tree.named()):
            values[setting] = ""
    changed = set(values)
    if not is_trained and spec.activation != ActivationSection():
        values |= {f"activation.{field}": value for field, value in asdict(ActivationSection()).items()}
        changed |= {name for name in spec.origins if name.startswith("activation.")}
    origins = {name: origin for name, origin in spec.origins.items() if name not in changed}
    return replace(spec.with_values(values, {}), origins=origins, problems=problems)
