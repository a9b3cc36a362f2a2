"""The modules and parameters of a model under all their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from hf_fsdp_plugin.plan.names import ancestors, common_path, is_inside, parent_of

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_LEAST_SHARE = 0.0005
"""A class that the model does not declare as layers must have at least this part of the model's parameters.

``scripts/bench/measure/layer_classes.py`` compares the resulting classes for all models of Transformers."""
_LEAST_COUNT = 1 / 8
"""Such a class must have at least this number of modules, as a part of those of the class with the most modules."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterEntry:
    """A parameter with all its names; a tied one has several. The first is the name in ``named_parameters()``."""

    parameter: nn.Parameter
    names: tuple[str, ...]
    ignored: bool

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def modules(self) -> tuple[str, ...]:
        """For each name, the name of the module in which the parameter is registered."""
        return tuple(parent_of(name) for name in self.names)

    @property
    def home(self) -> str:
        """The innermost module that contains all modules in which the parameter is registered."""
        return common_path(self.modules)

    @property
    def sharing_modules(self) -> list[str]:
        """The modules that contain some, but not all, of the modules in which the parameter is registered."""
        home = self.home
        return [path for module in self.modules for path in ancestors(module) if not is_inside(home, path)]

    @property
    def is_floating(self) -> bool:
        return self.parameter.is_floating_point()

    def stored_dtype(self, master: str) -> torch.dtype:
        """Return the dtype of the shards. `master` is the dtype of trainable parameters, unless it is ``unchanged``."""
        return torch.float32 if self.parameter.requires_grad and master == "fp32" else self.parameter.dtype


class ModuleTree:
    """The modules and parameters of a model, which are read once.

    Attributes:
        modules: name -> module, parents before children. A module that is registered twice has two names.
        first_names: ``id(module)`` -> the first of its names.
        ignored: ids of the modules that FSDP ignores, and of all modules inside them.
        parameters: the parameters, in the order of ``named_parameters()``.
    """

    def __init__(self, model: nn.Module, ignored_modules: Iterable[nn.Module] = ()) -> None:
        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.first_names = {id(module): name for name, module in self.named()}
        self.ignored = {id(inner) for module in ignored_modules for inner in module.modules()}
        self.parameters = self._find_parameters()

    def named(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield every module once, with its first name."""
        return self.model.named_modules()

    def name_of(self, module: object) -> str | None:
        """Return the first name of a module; ``None`` for an object that is not a module of this model."""
        return self.first_names.get(id(module))

    def present_classes(self) -> set[str]:
        """Return the names of the classes and base classes of all modules inside the model."""
        return {found for name, module in self.named() if name for found in class_names(module)}

    def class_counts(self) -> Counter[str]:
        """Return the number of modules with parameters per class, without containers and the model itself.

        The model's own classes come before torch's (``Linear``), which are rarely wrapped.
        """
        counts: list[Counter[str]] = [Counter(), Counter()]
        for name, module in self.named():
            if name and not isinstance(module, _CONTAINERS) and next(module.parameters(), None) is not None:
                counts[type(module).__module__.startswith("torch.")][type(module).__name__] += 1
        return Counter(dict([*counts[0].most_common(), *counts[1].most_common()]))

    def repeated_classes(self) -> tuple[str, ...]:
        """Return the likely layer classes, largest first: those that repeat in the outermost module lists.

        A class with few parameters, or with few modules beside a long list, is a part such as a merger of patches.
        Modules without modules inside them are layers only if nothing else repeats.
        """
        repeated = self._repeated_modules()
        sizes = {
            name: sum(p.numel() for module in found for p in module.parameters()) for name, found in repeated.items()
        }
        least = max(1, _LEAST_SHARE * sum(entry.parameter.numel() for entry in self.parameters))
        longest = max(map(len, repeated.values()), default=0)
        layers = [n for n, found in repeated.items() if sizes[n] >= least and len(found) >= _LEAST_COUNT * longest]
        nested = [name for name in layers if any(repeated[name][0].children())]
        return tuple(sorted(nested or layers, key=lambda name: -sizes[name]))

    def _repeated_modules(self) -> dict[str, list[nn.Module]]:
        """Return class name -> modules, for the classes with several modules in one of the outermost lists."""
        found: dict[str, list[nn.Module]] = {}
        lists: list[str] = []
        for name, module in self.named():
            if isinstance(module, nn.ModuleList | nn.Sequential) and not any(is_inside(name, outer) for outer in lists):
                counts = Counter(type(child) for child in module if not isinstance(child, _CONTAINERS))
                repeating = [child for child in module if counts[type(child)] > 1]
                lists += [name] if repeating else []
                for child in repeating:
                    found.setdefault(type(child).__name__, []).append(child)
        return found

    def _find_parameters(self) -> tuple[ParameterEntry, ...]:
        found: dict[int, tuple[nn.Parameter, list[str]]] = {}
        ignored: set[int] = set()
        for path, module in self.modules.items():
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                found.setdefault(id(parameter), (parameter, []))[1].append(f"{path}.{key}" if path else key)
                # Neither version of FSDP shards scalars: they have no dimension to shard.
                if id(module) in self.ignored or parameter.dim() == 0:
                    ignored.add(id(parameter))
        return tuple(
            ParameterEntry(parameter=parameter, names=tuple(names), ignored=key in ignored)
            for key, (parameter, names) in found.items()
        )


def class_names(module: nn.Module) -> set[str]:
    """Return the names of a module's class and of its base classes, without ``Module``."""
    return {base.__name__ for base in type(module).__mro__ if base not in (nn.Module, object)}


def no_split_classes(model: nn.Module) -> tuple[str, ...]:
    """Return the layer classes that the model and its submodules declare in ``_no_split_modules``."""
    found: set[str] = set()
    for module in model.modules():
        found.update(getattr(module, "_no_split_modules", None) or ())
    return tuple(sorted(found))
