"""The spec for a further model of a run, such as a reference, teacher or reward model.

The wrap settings were written for the model that is trained. They may not fit a further model of another architecture.
"""

from __future__ import annotations

import re
from dataclasses import replace

from torch import nn

from hf_fsdp_plugin.plan.modules import ModuleTree
from hf_fsdp_plugin.plan.policy import class_names, no_split_classes
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.fsdp_spec import ActivationSection, FsdpSpec, WrapSection
from hf_fsdp_plugin.text import format_names


def spec_of_further_model(spec: FsdpSpec, model: nn.Module, *, is_trained: bool) -> FsdpSpec:
    """Return ``spec`` with wrap settings that fit ``model``, and a warning for those that differ.

    Without a backward there are no activations to recompute, so a model that is not trained has no activation
    checkpointing.
    """
    wrap, reason = _fitting_wrap(spec.wrap, model)
    changed = {f"wrap.{name}" for name in ("policy", "classes") if getattr(wrap, name) != getattr(spec.wrap, name)}
    wrap = _fitting_ignored_modules(wrap, model)
    if wrap.ignored_modules != spec.wrap.ignored_modules:
        changed.add("wrap.ignored_modules")
    precision = spec.precision
    if not _fits(precision.fp32_modules, model):
        precision = replace(precision, fp32_modules="")
        changed.add("precision.fp32_modules")
    activation = spec.activation
    if not is_trained and activation != ActivationSection():
        activation = ActivationSection()
        changed |= {name for name in spec.origins if name.startswith("activation.")}
    problems = spec.problems
    if reason:
        setting = "wrap.min_num_params" if spec.wrap.policy == "size" else "wrap.classes"
        problems = (*problems, Problem(code="FSDP-W260", setting=setting, message=reason, origin=spec.origin(setting)))
    origins = {name: origin for name, origin in spec.origins.items() if name not in changed}
    return replace(spec, wrap=wrap, precision=precision, activation=activation, origins=origins, problems=problems)


def _fitting_wrap(wrap: WrapSection, model: nn.Module) -> tuple[WrapSection, str]:
    """Return wrap settings that select modules of ``model``, and the reason if they are not ``wrap``."""
    name = type(model).__name__
    inner = [module for module in model.modules() if module is not model]
    if wrap.policy == "size":
        sizes = [sum(parameter.numel() for parameter in module.parameters()) for module in inner]
        if max(sizes, default=0) >= wrap.min_num_params:
            return wrap, ""
        small = f"no module of {name}, a further model, has {wrap.min_num_params:,} parameters"
        return replace(wrap, policy="none", min_num_params=0), f"{small}. It is sharded as one unit."
    if wrap.policy == "none":
        return wrap, ""
    present = {found for module in inner for found in class_names(module)}
    if present.intersection(wrap.classes):
        return wrap, ""
    own = sorted(present.intersection(no_split_classes(model))) or ModuleTree(model).repeated_classes()
    if own and not wrap.classes:
        return wrap, ""
    absent = f"{name}, a further model, has no {format_names(wrap.classes)}" if wrap.classes else ""
    if own:
        return replace(wrap, classes=()), f"{absent}. Its own layer classes are wrapped: {format_names(own)}."
    absent = absent or f"{name}, a further model, has no layers that it declares or repeats"
    return replace(wrap, policy="none", classes=()), f"{absent}. It is sharded as one unit."


def _fitting_ignored_modules(wrap: WrapSection, model: nn.Module) -> WrapSection:
    """Remove a pattern that matches no module."""
    return wrap if _fits(wrap.ignored_modules, model) else replace(wrap, ignored_modules="")


def _fits(text: str, model: nn.Module) -> bool:
    """Whether a pattern is empty or matches a module. One that is invalid is kept, because it is reported."""
    try:
        pattern = re.compile(text)
    except re.error:
        return True
    return not text or any(pattern.fullmatch(name) for name, _ in model.named_modules())
