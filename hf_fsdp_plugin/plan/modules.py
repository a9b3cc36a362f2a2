"""A model as a plan sees it: every module under every name, every parameter once with all its names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from hf_fsdp_plugin.torch_private.modules import children, parameters

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True, kw_only=True, slots=True)
class Occurrence:
    """One name of a parameter: ``module`` holds it directly."""

    module: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterEntry:
    """A parameter with every name it goes by; the first is the one that ``named_parameters()`` gives."""

    parameter: nn.Parameter
    occurrences: tuple[Occurrence, ...]
    ignored: bool

    @property
    def name(self) -> str:
        return self.occurrences[0].name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(occurrence.name for occurrence in self.occurrences)


class ModelIndex:
    """Names and parameters of a model, read once and never changed.

    Attributes:
        modules: every path to a module, parents before children; a module used twice is here under both names.
        first_names: ``id(module)`` -> the first of its names.
        parameters: in the order of ``named_parameters()``.
        ignored: ids of the modules that FSDP leaves alone, with everything inside them.
    """

    def __init__(self, model: nn.Module, ignored_modules: Iterable[nn.Module] = ()) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = dict(_walk(model, "", ()))
        self.first_names: dict[int, str] = {}
        for name, module in self.modules.items():
            self.first_names.setdefault(id(module), name)
        self.ignored = {id(inner) for module in ignored_modules for inner in module.modules()}
        self.parameters = self._index_parameters()

    def name_of(self, module: object) -> str | None:
        """The first name of a module of this model; ``None`` for anything else."""
        return self.first_names.get(id(module))

    def named(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module once, under its first name."""
        for name, module in self.modules.items():
            if self.first_names[id(module)] == name:
                yield name, module

    def class_counts(self) -> Counter[str]:
        """How many modules of each class hold parameters; containers and the model itself are left out.

        The model's own classes come before torch's (``Linear``), which are seldom what one wraps.
        """
        counts: list[Counter[str]] = [Counter(), Counter()]
        for name, module in self.named():
            if name and not isinstance(module, _CONTAINERS) and next(module.parameters(), None) is not None:
                counts[type(module).__module__.startswith("torch.")][type(module).__name__] += 1
        return Counter(dict([*counts[0].most_common(), *counts[1].most_common()]))

    def repeated_classes(self) -> tuple[str, ...]:
        """Classes of the outermost repeated modules that hold most parameters: what a layer class would look like."""
        sizes: Counter[str] = Counter()
        listed: list[str] = []
        for name, module in self.named():
            if isinstance(module, nn.ModuleList | nn.Sequential) and not any(
                is_inside(name, outer) for outer in listed
            ):
                counts = Counter(type(child).__name__ for child in module if not isinstance(child, _CONTAINERS))
                repeated = {found for found, count in counts.items() if count > 1}
                if repeated:
                    listed.append(name)
                for child in module:
                    if type(child).__name__ in repeated:
                        sizes[type(child).__name__] += sum(p.numel() for p in child.parameters())
        largest = max(sizes.values(), default=0)
        return tuple(found for found, size in sizes.most_common() if size and size * 5 >= largest)

    def _index_parameters(self) -> tuple[ParameterEntry, ...]:
        found: dict[int, tuple[nn.Parameter, list[Occurrence]]] = {}
        ignored: set[int] = set()
        for path, module in self.modules.items():
            for key, parameter in parameters(module).items():
                if parameter is None:
                    continue
                name = f"{path}.{key}" if path else key
                found.setdefault(id(parameter), (parameter, []))[1].append(Occurrence(module=path, name=name))
                # Neither FSDP takes scalars: there is no axis to cut them along.
                if id(module) in self.ignored or parameter.dim() == 0:
                    ignored.add(id(parameter))
        return tuple(
            ParameterEntry(parameter=parameter, occurrences=tuple(occurrences), ignored=key in ignored)
            for key, (parameter, occurrences) in found.items()
        )


def _walk(module: nn.Module, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in above:  # a module that contains itself would never end
        return
    yield path, module
    for name, child in children(module).items():
        if child is not None:
            yield from _walk(child, f"{path}.{name}" if path else name, (*above, id(module)))


def parent_of(path: str) -> str:
    """``a.b`` for ``a.b.c``; the root's name for a top-level module."""
    return path.rpartition(".")[0]


def is_inside(path: str, outer: str) -> bool:
    """Whether ``path`` lies below ``outer`` or is it."""
    return not outer or path == outer or path.startswith(outer + ".")


def common_path(paths: Iterable[str]) -> str:
    """The innermost module that all paths lie in."""
    split = [path.split(".") if path else [] for path in paths]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) != 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
