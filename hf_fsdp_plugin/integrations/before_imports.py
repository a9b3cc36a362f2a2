"""The process of a rank before its script imports a library: whether it is a rank, and callbacks for later imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

RANK_VARIABLE: Final = "HF_FSDP_RANK_PID"
"""Environment variable with the process that is the rank, and the address at which the ranks of its job meet.

The children of a rank inherit its variables, but have other process numbers: they are no ranks, unless they are started
as ranks of another job, which meet at another address.
"""


def rank_process(environ: Mapping[str, str]) -> str:
    """Return the value of ``RANK_VARIABLE`` for this process."""
    return f"{os.getpid()} {environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"


def may_be_rank(environ: Mapping[str, str]) -> bool:
    """Return whether this process has the variables of a rank, and did not inherit them from a rank of the same job."""
    own = rank_process(environ)
    marked = environ.get(RANK_VARIABLE, own)
    return "RANK" in environ and (marked == own or marked.partition(" ")[2] != own.partition(" ")[2])


def is_rank() -> bool:
    """Return whether this process is the rank itself, and not one that it has forked."""
    return os.environ.get(RANK_VARIABLE, "").partition(" ")[0] == str(os.getpid())


class ImportCallbacks(MetaPathFinder):
    """Calls functions after modules are imported: scripts that do not use the Trainer must not wait for its import.

    It is the first finder in ``sys.meta_path`` while callbacks are waiting. It finds each module with the other
    finders, and wraps ``exec_module`` of the module's loader.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[Callable[[ModuleType], None]]] = {}

    def add(self, name: str, callback: Callable[[ModuleType], None]) -> None:
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
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            self._call_after_import(spec.loader)
        return spec

    def _call_after_import(self, loader: Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # pickling and source lookup need the original method
            execute(module)
            for callback in self._waiting.pop(module.__name__, ()):
                callback(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
