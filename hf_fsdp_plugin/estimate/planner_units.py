"""Units that the planner compares with the layers of a model: smaller ones to save memory, larger ones to save time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import nn

from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.plan.modules import ancestors, parent_of
from hf_fsdp_plugin.plan.policy import no_split_classes
from hf_fsdp_plugin.text import format_count

_MIN_SHARE: Final = 0.3
"""Smallest part of a layer's parameters for which a module inside it becomes a unit."""
_MAX_SHARE: Final = 0.98
"""A module with a larger part is not a smaller unit than the layer."""
_MIN_EXPERTS: Final = 4
"""Smallest number of modules of a list in a layer that are taken for experts."""
_LEVELS: Final = 4
"""Factor between the thresholds of the wrap policy by size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """Settings of the wrap policy.

    Attributes:
        settings: (canonical name, value). Empty for the units that the config or the model has.
        label: what is different, for people; empty if nothing is.
        size: compared with the layers: smaller units need less memory, larger ones fewer collectives.
    """

    settings: tuple[tuple[str, Any], ...] = ()
    label: str = ""
    size: Literal["given", "smaller", "larger"] = "given"


GIVEN: Final = Units()


def other_units(plan: FsdpPlan, model: nn.Module) -> Iterator[Units]:
    """Yield other units than those of a plan: the largest modules in layers, stacks of layers, and the whole model.

    FSDP2 has a unit for the embedding and one for the head. FSDP1 has both in its root, which stays gathered, so they
    are units of their own here.

    Args:
        plan: with the units to compare with.
        model: the model that was planned.
    """
    layers = [name for unit in plan.units if unit.from_policy for name in unit.modules]
    spec = plan.spec.wrap
    if spec.policy == "size":
        yield _by_size(max(1, spec.min_num_params // _LEVELS), "smaller")
        yield _by_size(spec.min_num_params * _LEVELS, "larger")
    elif spec.policy == "transformer" and layers:
        classes = spec.classes or tuple(name for name in no_split_classes(model) if name in _classes(model))
        if parts := _parts(model, layers):
            yield _by_class((*classes, *parts), parts, "smaller")
        if plan.backend == "fsdp1":
            yield from _outside_of_layers(plan, model, layers, classes)
        if stacks := _stacks(model, layers):
            yield _by_class(stacks, stacks, "larger")
    if spec.policy != "none" and layers:
        yield Units(settings=(("wrap.policy", "none"),), label="one unit", size="larger")


def _by_size(threshold: int, size: Literal["smaller", "larger"]) -> Units:
    settings = (("wrap.policy", "size"), ("wrap.min_num_params", threshold))
    return Units(settings=settings, label=f"units from {format_count(threshold)} parameters", size=size)


def _by_class(classes: Sequence[str], new: Sequence[str], size: Literal["smaller", "larger"]) -> Units:
    settings = (("wrap.policy", "transformer"), ("wrap.classes", tuple(dict.fromkeys(classes))))
    return Units(settings=settings, label=f"units of {', '.join(new)}", size=size)


def _classes(model: nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()}


def _parts(model: nn.Module, layers: Sequence[str]) -> tuple[str, ...]:
    """Return the classes of the largest modules in layers, such as MLPs and the experts of a mixture.

    Experts in a list are not among them: ranks that route no token to an expert would not gather it.
    """
    found: dict[str, None] = {}
    for layer in {type(module): module for module in map(model.get_submodule, layers)}.values():
        total = _size(layer)
        pending = list(layer.children())
        while pending:
            module = pending.pop(0)
            share = _size(module) / max(1, total)
            is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
            if is_list and len(list(module.children())) >= _MIN_EXPERTS:
                continue
            if is_list or share > _MAX_SHARE:
                pending += module.children()
            elif share >= _MIN_SHARE and not type(module).__module__.startswith("torch."):
                found[type(module).__name__] = None
    return tuple(found)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _outside_of_layers(
    plan: FsdpPlan, model: nn.Module, layers: Sequence[str], classes: Sequence[str]
) -> Iterator[Units]:
    """Yield units for the embedding, and for embedding and head, which are in the root of FSDP1."""
    names = [name for name in map(parent_of, plan.units[-1].parameters) if name]
    shared = {type(model.get_submodule(parent_of(name))).__name__ for tie in plan.ties for name in tie}
    smallest = min(_size(model.get_submodule(name)) for name in layers)
    large = [name for name in names if _size(model.get_submodule(name)) >= smallest]
    modules = [module for name in names if isinstance(module := model.get_submodule(name), nn.Embedding)]
    embeddings = [type(module).__name__ for module in modules if _size(module) >= _MIN_SHARE * smallest]
    if new := tuple(name for name in dict.fromkeys(embeddings) if name not in shared):
        yield _by_class((*classes, *new), new, "smaller")
    if not plan.ties and len(large) > len(embeddings):
        yield _by_size(smallest, "smaller")


def _stacks(model: nn.Module, layers: Sequence[str]) -> tuple[str, ...]:
    """Return the classes of modules that contain several layers each, if there are several of them."""
    containers: Counter[str] = Counter(_stack_of(model, name) for name in layers)
    stacks = [name for name, count in containers.items() if name and count > 1]
    if len(stacks) < 2 or len(stacks) < len(containers):
        return ()
    return tuple(dict.fromkeys(type(model.get_submodule(name)).__name__ for name in stacks))


def _stack_of(model: nn.Module, layer: str) -> str:
    """Return the innermost module around a layer that is called."""
    lists = (nn.ModuleList, nn.ModuleDict)
    return next((p for p in ancestors(parent_of(layer)) if not isinstance(model.get_submodule(p), lists)), "")
