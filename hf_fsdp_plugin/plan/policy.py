"""Selects the modules of the wrap policy, and the ignored modules, by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping

from torch import nn

from hf_fsdp_plugin.plan.modules import ModuleTree, parent_of
from hf_fsdp_plugin.plan.problem_collector import ProblemCollector
from hf_fsdp_plugin.spec.model import FsdpSpec
from hf_fsdp_plugin.spec.rules import check_ignored_modules
from hf_fsdp_plugin.text import format_names
from hf_fsdp_plugin.torch_private.modules import CHECKPOINTED_ATTRIBUTE

# As in torch's size_based_auto_wrap_policy: lists are never called, and attention reads its projections' weights.
_NEVER_WRAPPED = (nn.ModuleList, nn.ModuleDict)
_NEVER_ENTERED = (nn.MultiheadAttention,)


def ignored_modules(spec: FsdpSpec, model: nn.Module, problems: ProblemCollector) -> tuple[str, ...]:
    """Names of the modules whose full name matches the pattern ``wrap.ignored_modules``."""
    pattern = spec.wrap.ignored_modules
    if not pattern:
        return ()
    setting = "wrap.ignored_modules"
    if invalid := list(check_ignored_modules(spec)):
        problems.extend(invalid)
        return ()
    compiled = re.compile(pattern)
    names = [name for name, _ in model.named_modules()]
    matched = tuple(name for name in names if compiled.fullmatch(name))
    if "" in matched:
        problems.add(
            "FSDP-E211",
            setting,
            f"{pattern!r} matches the name of the root, so all parameters would be ignored.",
            "Write a pattern that matches only the modules to ignore.",
        )
        return ()
    if not matched:
        partial = [name for name in names if compiled.search(name)]
        near = partial or difflib.get_close_matches(pattern, names, n=3)
        example = f" The pattern must match the full name, such as {format_names(near, 3)}." if near else ""
        problems.add(
            "FSDP-E212",
            setting,
            f"{pattern!r} does not match the full name of any module of {type(model).__name__}.{example}",
            f"Write {'.*' + pattern + '.*' if partial else 'a pattern for full module names'}, or remove the key.",
        )
    return matched


def policy_modules(spec: FsdpSpec, tree: ModuleTree, problems: ProblemCollector) -> tuple[str, ...]:
    """First names of the modules that the policy selects, children before parents. Never the root."""
    if spec.wrap.policy == "size":
        return _by_size(spec, tree, problems)
    if spec.wrap.policy == "transformer":
        classes = _given_classes if spec.wrap.classes else _own_classes
        return _by_class(tree, classes(spec, tree, problems))
    return ()


def _by_class(tree: ModuleTree, classes: set[str]) -> tuple[str, ...]:
    selected: dict[str, None] = {}
    for name, module in tree.named():
        if name and id(module) not in tree.ignored and not classes.isdisjoint(class_names(module)):
            selected[_with_checkpoint_wrapper(tree, name)] = None
    return post_order(selected)


def _with_checkpoint_wrapper(tree: ModuleTree, name: str) -> str:
    """The name of the wrapper around a module that the user's code checkpoints, else the module's own name."""
    parent = parent_of(name)
    is_wrapped = name.rpartition(".")[2] == CHECKPOINTED_ATTRIBUTE and parent
    return tree.first_names[id(tree.modules[parent])] if is_wrapped else name


def post_order(names: Iterable[str]) -> tuple[str, ...]:
    """Sort children before parents, and otherwise keep the order. Expects parents before children."""
    ordered: list[str] = []
    parents: list[str] = []
    for name in names:
        while parents and not name.startswith(parents[-1] + "."):
            ordered.append(parents.pop())
        parents.append(name)
    return (*ordered, *reversed(parents))


def class_names(module: nn.Module) -> set[str]:
    """Names of a module's class and its base classes, without ``Module``."""
    return {base.__name__ for base in type(module).__mro__ if base not in (nn.Module, object)}


def _given_classes(spec: FsdpSpec, tree: ModuleTree, problems: ProblemCollector) -> set[str]:
    present = {found for name, module in tree.named() if name for found in class_names(module)}
    matched = [name for name in spec.wrap.classes if name in present]
    absent = list(dict.fromkeys(name for name in spec.wrap.classes if name not in present))
    if absent:
        _add_absent_classes(tree, matched, absent, problems)
    return set(matched)


def _add_absent_classes(
    tree: ModuleTree, matched: Collection[str], absent: Collection[str], problems: ProblemCollector
) -> None:
    counts = tree.class_counts()
    own = [name for name in no_split_classes(tree.model) if name in counts]
    close = [found for name in absent for found in difflib.get_close_matches(name, counts, n=1, cutoff=0.7)]
    near = list(dict.fromkeys(close))
    message = f"{type(tree.model).__name__} has no module of class {format_names([repr(name) for name in absent])}"
    if matched:
        problems.add(
            "FSDP-W213",
            "wrap.classes",
            f"{message}. Only modules of class {format_names(matched)} become units.",
            f"Did you mean {format_names(near)}?" if near else "Remove it, unless this config is for several models.",
        )
        return
    message += f". It has {_counts_text(dict.fromkeys([*near, *own, *counts]), counts)}."
    if near or own:
        keep = ", or remove the key: the model declares its own layer classes." if own else "."
        problems.add("FSDP-E214", "wrap.classes", message, f"Write {format_names(near or own[:1])}{keep}")
    else:
        problems.add("FSDP-E214", "wrap.classes", message, _class_advice(tree))


def _counts_text(names: Iterable[str], counts: Mapping[str, int]) -> str:
    """``LlamaDecoderLayer ×30, LlamaMLP ×30 and 3 more``."""
    return format_names([f"{name} ×{counts[name]}" for name in names], 5) or "no modules with parameters"


def no_split_classes(model: nn.Module) -> tuple[str, ...]:
    """The layer classes that the model and its submodules declare in ``_no_split_modules`` (set, list or ``None``)."""
    found: set[str] = set()
    for module in model.modules():
        found.update(getattr(module, "_no_split_modules", None) or ())
    return tuple(sorted(found))


def _own_classes(spec: FsdpSpec, tree: ModuleTree, problems: ProblemCollector) -> set[str]:
    declared = no_split_classes(tree.model)
    present = {found for name, module in tree.named() if name for found in class_names(module)}
    if matched := present.intersection(declared):
        return matched
    counts = tree.class_counts()
    reason = f"declares {format_names(declared)}, but has no such module" if declared else "declares no layer classes"
    problems.add(
        "FSDP-E215",
        "wrap.classes" if spec.asked("wrap.classes") else "wrap.policy",
        f"{type(tree.model).__name__} {reason}. It has {_counts_text(counts, counts)}.",
        _class_advice(tree),
    )
    return set()


def _class_advice(tree: ModuleTree) -> str:
    classes = ",".join(tree.repeated_classes())
    key = f"fsdp_transformer_layer_cls_to_wrap: {classes}" if classes else "fsdp_transformer_layer_cls_to_wrap"
    return f"Set {key}, or use SIZE_BASED_WRAP with fsdp_min_num_params."


def _by_size(spec: FsdpSpec, tree: ModuleTree, problems: ProblemCollector) -> tuple[str, ...]:
    threshold = spec.wrap.min_num_params
    if threshold <= 0:
        problems.add(
            "FSDP-E142",
            "wrap.min_num_params" if spec.asked("wrap.min_num_params") else "wrap.policy",
            f"the size policy requires min_num_params above 0; it is {threshold}.",
            "Set fsdp_min_num_params, for example to 100M.",
        )
        return ()
    ignored = {id(entry.parameter) for entry in tree.parameters if entry.ignored}
    sizes: dict[int, int] = {}
    selected: dict[int, None] = {}

    def size(module: nn.Module) -> int:
        if id(module) not in sizes:
            sizes[id(module)] = sum(p.numel() for p in module.parameters() if id(p) not in ignored)
        return sizes[id(module)]

    def select(module: nn.Module, is_root: bool) -> int:
        """Return the number of parameters in units inside ``module``. Follows torch's ``_recursive_wrap``."""
        if size(module) < threshold or isinstance(module, _NEVER_ENTERED):
            return 0
        inner = sum(select(child, False) for child in module.children() if id(child) not in tree.ignored)
        if not is_root and size(module) - inner >= threshold and not isinstance(module, _NEVER_WRAPPED):
            selected[id(module)] = None
            return size(module)
        return inner

    select(tree.model, True)
    return tuple(tree.first_names[key] for key in selected)
