"""Callbacks for modules that are not imported yet.

Importing the Trainer takes about seven seconds. A script that does not use the Trainer must not pay for it, and in a
script that does, the Trainer must be hooked.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], None]


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` once: now if the module is loaded, else right after its first import."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        callback(module)
        return
    finder = next(iter(_finders()), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.callbacks.setdefault(name, []).append(callback)


def cancel_callbacks() -> None:
    """Forget the callbacks of modules that are still not imported."""
    for finder in _finders():
        finder.callbacks.clear()
        sys.meta_path.remove(finder)


def _finders() -> list[_Finder]:
    return [finder for finder in sys.meta_path if isinstance(finder, _Finder)]


class _Finder(MetaPathFinder):
    """Finds nothing itself. First in ``sys.meta_path``, it wraps the loaders of the modules with callbacks."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callback]] = {}
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.callbacks or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.callbacks)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, callbacks: dict[str, list[Callback]]) -> None:
        self._loader = loader
        self._callbacks = callbacks

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Code that inspects the module later (pickling, source lookup) must find the real loader.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for callback in self._callbacks.pop(module.__name__, ()):
            callback(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
