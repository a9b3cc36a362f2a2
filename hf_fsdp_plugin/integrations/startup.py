"""The plugin in ranks of stock launchers: what the file of ``hf-fsdp enable`` runs when Python starts.

A launcher's rank gets the hooks when the script has imported Accelerate or Transformers. ``install()`` runs when FSDP
is first asked for: at the first call of a hooked function if ``accelerate launch`` has FSDP settings, else when the
script creates an FSDP plugin or ``TrainingArguments`` with FSDP. Other processes, and ranks without FSDP, run as
without the plugin. A script that calls ``install()`` itself runs as if the plugin were not enabled.

This module also tells whether a process is a rank, and calls functions after later imports.
"""

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
_LAUNCHERS: Final = frozenset(
    (
        *("accelerate", "accelerate-launch", "hf-fsdp", "torchrun"),
        *("accelerate.commands.accelerate_cli", "accelerate.commands.launch", "hf_fsdp_plugin.cli.main"),
        *("torch.distributed.launch", "torch.distributed.run"),
    )
)
"""Programs and modules that start ranks. A cluster may have set the variables of a rank for them."""


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


_imports = ImportCallbacks()


def start() -> None:
    """Wait for the first import of Accelerate or Transformers if this process is a rank of a stock launcher."""
    if _imports in sys.meta_path:  # Python reads the files of a virtual environment twice
        return
    program = _program()
    if program in _LAUNCHERS or sys.flags.ignore_environment or not may_be_rank(os.environ):
        return
    os.environ[RANK_VARIABLE] = rank_process(os.environ)
    if program.partition(".")[0] != "hf_fsdp_plugin":  # modules of this package call install() themselves
        _imports.add("accelerate", _install_hooks)
        _imports.add("transformers", _install_hooks)


def _program() -> str:
    """Return the module, or the name of the script, that this process runs. ``sys.argv`` is not complete yet."""
    words = iter(sys.orig_argv[1:])
    for word in words:
        if word in ("-W", "-X"):
            next(words, None)
        elif word.startswith("-") and word.endswith("m"):
            return next(words, "")
        elif not word.startswith("-") or word.endswith("c"):
            return os.path.basename(word)
    return ""


def _install_hooks(module: ModuleType) -> None:
    _imports.close()
    if not is_rank():
        return
    from hf_fsdp_plugin.integrations import patching
    from hf_fsdp_plugin.integrations.session import session

    launched_with_fsdp = patching.is_true("ACCELERATE_USE_FSDP")
    patching.install_hooks("accelerate", "transformers")
    if launched_with_fsdp:
        patching.install_hooks("loading")  # a script may load its model before anything else
    session.defer(_install, until_call=launched_with_fsdp)


def _install() -> None:
    if is_rank():
        from hf_fsdp_plugin.integrations.install import install
        from hf_fsdp_plugin.integrations.session import session

        install()
        session.is_automatic = True
