"""Splits FSDP1 units so that all parameters of a unit have one dtype and, if necessary, one ``requires_grad``.

FSDP1 flattens the parameters of a unit into one tensor. That tensor has one dtype. Without ``use_orig_params`` it is
also the parameter that the optimizer updates, so it is either frozen or trainable. The modules with the other
parameters of a unit (LoRA adapters in frozen layers, fp32 norms among quantized weights) become units of their own, as
``peft.utils.other.fsdp_auto_wrap_policy`` does for leaf modules with a trainable weight.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Final

import torch
from torch import nn

from hf_fsdp_plugin.plan.model import PrecisionPlan
from hf_fsdp_plugin.plan.modules import ModuleTree, ParameterEntry, ancestors, common_path, is_inside
from hf_fsdp_plugin.plan.policy import class_names

Kind = Hashable
"""What all parameters of a unit must have in common."""

_READS_CHILDREN: Final = frozenset({"MultiheadAttention", "ParamWrapper", "TrainableTokensLayer"})
"""Classes that read the weights of their children instead of calling them: torch's attention, and two of PEFT's.

FSDP1 gathers a unit when its module is called, so these children cannot be units."""
_CALLS_BASE_LAYER: Final = frozenset({"IA3Layer", "LoraLayer", "LycorisLayer", "VeraLayer"})
"""PEFT's classes with bare parameters around a ``base_layer`` that is called. Others read its weight."""
_MAGNITUDE: Final = "lora_magnitude_vector"
"""DoRA's attribute in a LoRA layer, which then reads the weight of its base layer."""


def kind_of(entry: ParameterEntry, precision: PrecisionPlan, use_orig: bool) -> tuple[torch.dtype, bool | None]:
    """Return the dtype in which FSDP1 stores a parameter, and ``requires_grad`` if the flat parameter has only one."""
    parameter = entry.parameter
    is_cast = parameter.requires_grad and precision.master == "fp32"
    return torch.float32 if is_cast else parameter.dtype, None if use_orig else parameter.requires_grad


def modules_to_split_off(
    tree: ModuleTree, unit: str, entries: Sequence[ParameterEntry], kind: Callable[[ParameterEntry], Kind]
) -> tuple[str, ...]:
    """Return the modules inside ``unit`` to wrap as separate units, so that every unit has parameters of one kind.

    The kind with the most elements stays in the unit if that is possible. Returns no modules if the unit has one kind
    already, or if no choice of modules separates the kinds.

    Args:
        unit: name of the unit's module; empty for the root.
        entries: the parameters of the unit, without those of units inside it.
    """
    return tuple(_Splitter(tree, entries, kind).modules_inside(unit))


def inseparable(
    tree: ModuleTree, entries: Sequence[ParameterEntry], kind: Callable[[ParameterEntry], Kind]
) -> str | None:
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

    def __init__(
        self, tree: ModuleTree, entries: Sequence[ParameterEntry], kind: Callable[[ParameterEntry], Kind]
    ) -> None:
        self._tree, self._kind = tree, kind
        self.own: dict[str, list[ParameterEntry]] = defaultdict(list)
        self.kinds: dict[str, Counter[Kind]] = defaultdict(Counter)
        self._children: dict[str, dict[str, None]] = defaultdict(dict)
        self._sharing: set[str] = set()
        self._found: dict[tuple[str, Kind], list[str] | None] = {}
        for entry in entries:
            home = common_path(entry.modules)
            self.own[home].append(entry)
            path = home
            for path in (*ancestors(home), ""):
                self.kinds[path][kind(entry)] += entry.parameter.numel()
                if path:
                    self._children[path.rpartition(".")[0]][path] = None
            for module in entry.modules:
                for path in ancestors(module):
                    if path == home:
                        break
                    self._sharing.add(path)

    def modules_inside(self, unit: str) -> list[str]:
        if len(self.kinds[unit]) < 2:
            return []
        choices = [found for kind in self._by_size(unit) if (found := self._leaving(unit, kind)) is not None]
        # A layer without parameters of its own would not be a unit, and would not be checkpointed.
        return next((found for found in choices if self._remain(found)), choices[0] if choices else [])

    def _remain(self, split: Collection[str]) -> bool:
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

    def _by_size(self, path: str) -> Collection[Kind]:
        return [kind for kind, _ in self.kinds[path].most_common()]

    def _leaving(self, path: str, kind: Kind) -> list[str] | None:
        """Return the modules to wrap so that only parameters of ``kind`` remain in ``path``; ``None`` if impossible."""
        key = path, kind
        if key not in self._found:
            self._found[key] = self._search(path, kind)
        return self._found[key]

    def _search(self, path: str, kind: Kind) -> list[str] | None:
        if any(self._kind(entry) != kind for entry in self.own.get(path, ())):
            return None
        found: list[str] = []
        for child in self._children[path]:
            inner = self._covering(child, kind)
            if inner is None or (inner and not self.may_divide(path)):
                return None
            found += inner
        return found

    def _covering(self, child: str, kind: Kind) -> list[str] | None:
        """Return the modules to wrap, ``child`` or modules inside it, so that only ``kind`` remains around them."""
        kinds = self._by_size(child)
        if kinds == [kind]:
            return []
        can_wrap = self._can_wrap(child)
        if can_wrap and len(kinds) == 1:
            return [child]
        inner = self._leaving(child, kind)
        if inner is not None or not can_wrap:
            return inner
        for other in kinds:
            inner = self._leaving(child, other) if other != kind else None
            if inner is not None:
                return [*inner, child]
        return None
