"""The module that runs at each moment of a forward and a backward."""

from __future__ import annotations

from collections.abc import Iterable

from torch.utils.module_tracker import ModuleTracker


class _Running(dict[str, None]):
    """Names of the modules that run, in the order in which they began, as ``ModuleTracker`` uses its set."""

    def add(self, name: str) -> None:
        self.pop(name, None)
        self[name] = None

    def remove(self, name: str) -> None:
        for each in [each for each in self if each == name or each.startswith(f"{name}.")]:
            del self[each]

    @property
    def innermost(self) -> str:
        last = next(reversed(self))
        return max((name for name in self if name == last or name.startswith(f"{last}.")), key=len)


class RunningModule(ModuleTracker):
    """Tracks the module that runs, in forward and backward.

    ``ModuleTracker`` does not notice the end of a backward whose module got its inputs as keyword arguments, as
    attention does. Here, the module whose backward began last is the one that runs.
    """

    @property  # type: ignore[override]
    def parents(self) -> _Running:
        return self._running

    @parents.setter
    def parents(self, names: Iterable[str]) -> None:
        self._running = _Running((name, None) for name in names)
