"""Callbacks for modules that are not imported yet.

Importing the Trainer takes about seven seconds. Scripts that do not use the Trainer must not wait for this import, but
the Trainer must be hooked in scripts that use it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]


class ImportCallbacks(MetaPathFinder):
    """Calls functions after modules are imported.

    It is the first finder in ``sys.meta_path`` while callbacks are waiting. It finds each module with the other
    finders, and wraps ``exec_module`` of the module's loader.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[Callback]] = {}

    def add(self, name: str, callback: Callback) -> None:
        """Call ``callback(module)`` once: now if the module is already imported, else after its first import."""
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            callback(module)
            return
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        self._waiting.setdefault(name, []).append(callback)

    def close(self) -> None:
        """Remove the callbacks of modules that are not imported yet."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._waiting:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    self._call_after_import(spec.loader)
                return spec
        return None

    def _call_after_import(self, loader: Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # pickling and source lookup need the original method
            execute(module)
            for callback in self._waiting.pop(module.__name__, ()):
                callback(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
