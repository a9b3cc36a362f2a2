"""Which modules the wrap policy picks. Names only: what becomes of them is decided in ``wrap``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from torch import nn

from hf_fsdp_plugin.plan.complaints import Complaints, shortened
from hf_fsdp_plugin.plan.modules import ModelIndex, parent_of
from hf_fsdp_plugin.spec.model import FsdpSpec
from hf_fsdp_plugin.torch_private.modules import CHECKPOINTED_ATTRIBUTE

# As torch's size_based_auto_wrap_policy has them: lists are never called, and attention reads its projections' weights.
_NEVER_WRAPPED = (nn.ModuleList, nn.ModuleDict)
_NEVER_ENTERED = (nn.MultiheadAttention,)


def ignored_modules(spec: FsdpSpec, model: nn.Module, complaints: Complaints) -> tuple[str, ...]:
    """Names that the pattern of ``wrap.ignored_modules`` matches as a whole."""
    pattern = spec.wrap.ignored_modules
    if not pattern:
        return ()
    setting = "wrap.ignored_modules"
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        complaints.error(setting, f"{pattern!r} is no regular expression: {error}.")
        return ()
    names = [name for name, _ in model.named_modules()]
    matched = tuple(name for name in names if compiled.fullmatch(name))
    if "" in matched:
        complaints.error(
            setting,
            f"{pattern!r} matches the whole model, so that nothing is left to shard.",
            "Write a pattern that matches only the modules to leave out.",
        )
        return ()
    if not matched:
        partial = [name for name in names if compiled.search(name)]
        near = partial or difflib.get_close_matches(pattern, names, n=3)
        has = f"; it would have to match the whole name, such as {shortened(near, 3)}" if near else ""
        complaints.error(
            setting,
            f"{pattern!r} matches the full name of no module of {type(model).__name__}{has}.",
            f"Write {'.*' + pattern + '.*' if partial else 'a pattern for full module names'}, or leave the key out.",
        )
    return matched


def policy_modules(spec: FsdpSpec, index: ModelIndex, complaints: Complaints) -> tuple[str, ...]:
    """First names of the modules that the policy picks, children before parents; never the root."""
    if spec.wrap.policy == "size":
        return _by_size(spec, index, complaints)
    if spec.wrap.policy == "transformer":
        choose = _given_classes if spec.wrap.classes else _own_classes
        return _by_class(index, choose(spec, index, complaints))
    return ()


def _by_class(index: ModelIndex, classes: set[str]) -> tuple[str, ...]:
    picked: dict[str, None] = {}
    for name, module in index.named():
        if name and id(module) not in index.ignored and not classes.isdisjoint(class_names(module)):
            picked[_checkpoint_wrapper(index, name)] = None
    return post_order(picked)


def _checkpoint_wrapper(index: ModelIndex, name: str) -> str:
    """The wrapper that checkpoints this module, if its author put one round it: the unit is then the wrapper."""
    parent = parent_of(name)
    wraps = name.rpartition(".")[2] == CHECKPOINTED_ATTRIBUTE and parent
    return index.first_names[id(index.modules[parent])] if wraps else name


def post_order(names: Iterable[str]) -> tuple[str, ...]:
    """Children before parents, otherwise in the order given (which has parents first)."""
    ordered: list[str] = []
    open_names: list[str] = []
    for name in names:
        while open_names and not name.startswith(open_names[-1] + "."):
            ordered.append(open_names.pop())
        open_names.append(name)
    return (*ordered, *reversed(open_names))


def class_names(module: nn.Module) -> set[str]:
    """The names that ``isinstance`` would go by; ``Module`` is everything's base and says nothing."""
    return {base.__name__ for base in type(module).__mro__ if base not in (nn.Module, object)}


def _given_classes(spec: FsdpSpec, index: ModelIndex, complaints: Complaints) -> set[str]:
    asked = dict.fromkeys(spec.wrap.classes)
    present = {found for name, module in index.named() if name for found in class_names(module)}
    matched = [name for name in asked if name in present]
    absent = [name for name in asked if name not in present]
    counts = index.class_counts()
    model_name = type(index.model).__name__
    own = [name for name in no_split_classes(index.model) if name in counts]
    for name in absent:
        near = difflib.get_close_matches(name, counts, n=1, cutoff=0.7)
        listed = dict.fromkeys([*near, *own, *counts])
        has = shortened_counts(listed, counts)
        if matched:
            complaints.warning(
                "wrap.classes",
                f"no module of class {name!r} in {model_name}; only {', '.join(matched)} become units.",
                f"Did you mean {near[0]}?" if near else "Leave it out, unless the file serves several models.",
            )
        elif near or own:
            write = f"Write {near[0] if near else own[0]}"
            rest = ", or leave the key out: the model names its own layer class." if own else "."
            complaints.error("wrap.classes", f"no module of class {name!r} in {model_name}; it has {has}", write + rest)
        else:
            complaints.error(
                "wrap.classes",
                f"no module of class {name!r} in {model_name}; it has {has}",
                f"{_naming(index)}, or take SIZE_BASED_WRAP with fsdp_min_num_params.",
            )
    return set(matched)


def shortened_counts(names: Iterable[str], counts: dict[str, int], limit: int = 5) -> str:
    """``LlamaDecoderLayer ×30, LlamaMLP ×30, …``; the end of a sentence."""
    listed = [f"{name} ×{counts[name]}" for name in names]
    if not listed:
        return "no modules with parameters."
    return ", ".join(listed[:limit]) + (", …" if len(listed) > limit else ".")


def no_split_classes(model: nn.Module) -> tuple[str, ...]:
    """The layer classes that the model and its parts name themselves (``_no_split_modules``: set, list or ``None``)."""
    found: set[str] = set()
    for module in model.modules():
        found.update(getattr(module, "_no_split_modules", None) or ())
    return tuple(sorted(found))


def _own_classes(spec: FsdpSpec, index: ModelIndex, complaints: Complaints) -> set[str]:
    own = no_split_classes(index.model)
    present = {found for name, module in index.named() if name for found in class_names(module)}
    matched = {name for name in own if name in present}
    if matched:
        return matched
    counts = index.class_counts()
    model_name = type(index.model).__name__
    said = f"names {', '.join(own)}, but has none of them" if own else "names no layer class of its own"
    complaints.error(
        "wrap.classes" if spec.asked("wrap.classes") else "wrap.policy",
        f"{model_name} {said}; it has {shortened_counts(counts, counts)}",
        f"{_naming(index)}, or take SIZE_BASED_WRAP with fsdp_min_num_params.",
    )
    return set()


def _naming(index: ModelIndex) -> str:
    """The advice to name classes, with the likely ones where the model has repeated layers."""
    likely = ",".join(index.repeated_classes())
    if likely:
        return f"Set fsdp_transformer_layer_cls_to_wrap: {likely}"
    return "Name the classes to wrap with fsdp_transformer_layer_cls_to_wrap"


def _by_size(spec: FsdpSpec, index: ModelIndex, complaints: Complaints) -> tuple[str, ...]:
    threshold = spec.wrap.min_num_params
    if threshold <= 0:
        complaints.error(
            "wrap.min_num_params" if spec.asked("wrap.min_num_params") else "wrap.policy",
            "the size policy needs a threshold above 0: the number of parameters from which a module is a unit.",
            "Set fsdp_min_num_params, such as 100M.",
        )
        return ()
    ignored = {id(entry.parameter) for entry in index.parameters if entry.ignored}
    sizes: dict[int, int] = {}
    picked: dict[int, None] = {}

    def size(module: nn.Module) -> int:
        if id(module) not in sizes:
            sizes[id(module)] = sum(p.numel() for p in module.parameters() if id(p) not in ignored)
        return sizes[id(module)]

    def wrapped(module: nn.Module, is_root: bool) -> int:
        """Parameters in units once ``module`` has been through; follows torch's ``_recursive_wrap``."""
        if size(module) < threshold or isinstance(module, _NEVER_ENTERED):
            return 0
        inner = sum(wrapped(child, False) for child in module.children() if id(child) not in index.ignored)
        if not is_root and size(module) - inner >= threshold and not isinstance(module, _NEVER_WRAPPED):
            picked[id(module)] = None
            return size(module)
        return inner

    wrapped(index.model, True)
    return tuple(index.first_names[key] for key in picked)
