"""Finds equal layers of a model, of which only some need to run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn

_MIN_LAYERS = 5
"""Smallest number of equal layers of which some are skipped: the first two and the last two always run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualLayers:
    """Layers with the same structure, of which some run, and the others copy what was counted for `representative`.

    Attributes:
        representative: name of the second layer. The first and the last layer may differ at their borders.
        copies: names of the layers that do not run.
    """

    representative: str
    copies: tuple[str, ...]


def equal_layers(model: nn.Module, distinct: Collection[str] = ()) -> list[EqualLayers]:
    """Return the groups of equal layers in the model's outermost module lists that are large enough to skip some.

    Args:
        distinct: names of parameters that are computed in another dtype than the others.
    """
    found = []
    for path, layers in _outermost_lists(model):
        groups: dict[object, list[str]] = defaultdict(list)
        for index, layer in enumerate(layers):
            prefix = f"{path}.{index}."
            special = tuple(name.removeprefix(prefix) for name in distinct if name.startswith(prefix))
            groups[_structure(layer), special].append(f"{path}.{index}")
        found += [
            EqualLayers(representative=names[1], copies=tuple(names[2:-1]))
            for names in groups.values()
            if len(names) >= _MIN_LAYERS
        ]
    return found


def _outermost_lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    inside: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(outer) for outer in inside):
            inside.append(f"{path}.")
            yield path, module


def _structure(layer: nn.Module) -> object:
    """Return what equal layers have in common: classes, shapes, dtypes, and settings such as a sliding window."""
    modules = tuple((name, type(module), _settings(module)) for name, module in layer.named_modules())
    parameters = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    return modules, parameters


def _settings(module: nn.Module) -> tuple[object, ...]:
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | bool) and "idx" not in name and "index" not in name
    )
