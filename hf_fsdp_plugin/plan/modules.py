"""The modules and parameters of a model under all their names, and the classes of its layers."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import ProblemCollector
from hf_fsdp_plugin.plan.names import ancestors, common_path, is_inside, parent_of
from hf_fsdp_plugin.text import format_names

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
        ignored = list(ignored_modules)
        self.ignored = {id(inner) for module in ignored for inner in module.modules()}
        unsharded = {id(parameter) for module in ignored for parameter in module.parameters()}
        found: dict[int, tuple[nn.Parameter, list[str]]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), (parameter, []))[1].append(name)
        self.parameters = tuple(
            # Neither version of FSDP shards scalars: they have no dimension to shard.
            ParameterEntry(parameter=each, names=tuple(names), ignored=key in unsharded or each.dim() == 0)
            for key, (each, names) in found.items()
        )

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
        sizes = {name: sum(p.numel() for m in found for p in m.parameters()) for name, found in repeated.items()}
        least = max(1, _LEAST_SHARE * sum(entry.parameter.numel() for entry in self.parameters))
        longest = max(map(len, repeated.values()), default=0)
        layers = [n for n, found in repeated.items() if sizes[n] >= least and len(found) >= _LEAST_COUNT * longest]
        nested = [name for name in layers if any(repeated[name][0].children())]
        return tuple(sorted(nested or layers, key=lambda name: -sizes[name]))

    def own_classes(self) -> set[str]:
        """Return the layer classes that the model declares and has, else those that it repeats."""
        return self.present_classes().intersection(no_split_classes(self.model)) or set(self.repeated_classes())

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


def class_names(module: nn.Module) -> set[str]:
    """Return the names of a module's class and of its base classes, without ``Module``."""
    return {base.__name__ for base in type(module).__mro__ if base not in (nn.Module, object)}


def no_split_classes(model: nn.Module) -> tuple[str, ...]:
    """Return the layer classes that the model and its submodules declare in ``_no_split_modules``."""
    declared = (getattr(module, "_no_split_modules", None) or () for module in model.modules())
    return tuple(sorted({name for names in declared for name in names}))


def matching_modules(setting: str, model: nn.Module, problems: ProblemCollector) -> tuple[str, ...]:
    """Return the names of the modules whose full name matches the regular expression of a setting."""
    if not (pattern := problems.spec.get(setting)):
        return ()
    compiled = re.compile(pattern)
    names = [name for name, _ in model.named_modules()]
    matched = tuple(name for name in names if compiled.fullmatch(name))
    if "" in matched:
        message = f"{pattern!r} matches the empty name of the root, so all parameters would be "
        message += f"{'ignored' if setting == 'wrap.ignored_modules' else 'in fp32'}."
        fix = "Write a pattern that matches only the modules that are meant."
        problems.add("FSDP-E211", setting, message, fix)
        return ()
    if not matched:
        partial = [name for name in names if compiled.search(name)]
        near = partial or difflib.get_close_matches(pattern, names, n=3)
        example = f" It must match a full name, such as {format_names(near, 3)}." if near else ""
        message = f"{pattern!r} does not match the full name of any module of {type(model).__name__}.{example}"
        fix = f"Write {'.*' + pattern + '.*' if partial else 'a pattern for full module names'}, or remove the key."
        problems.add("FSDP-E212", setting, message, fix)
    return matched


def post_order(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names with children before parents, otherwise in order. Expects parents before children."""
    ordered: list[str] = []
    parents: list[str] = []
    for name in names:
        while parents and not name.startswith(parents[-1] + "."):
            ordered.append(parents.pop())
        parents.append(name)
    return (*ordered, *reversed(parents))
