"""What is changed in this process, and restored by ``uninstall``: functions of other libraries, environment variables.

The functions are the rows of :mod:`hf_fsdp_plugin.integrations.hooks`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from hf_fsdp_plugin.contracts import missing_name_error, off_warning
from hf_fsdp_plugin.integrations.before_imports import ImportCallbacks
from hf_fsdp_plugin.integrations.hooks import HOOKS, Group, Hook
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.state import process
from hf_fsdp_plugin.torch_private.modules import entries_in_block
from hf_fsdp_plugin.vocabulary import TRUE_WORDS


@dataclass(frozen=True, kw_only=True, slots=True)
class _ReplacedFunction:
    """A function of a module, which other modules may have imported by name."""

    name: str
    original: Callable[..., Any]
    replacement: Callable[..., Any]


class ProcessChanges:
    """The hooks and variables of one process. A hook is installed once, now or right after its module is imported.

    Attributes:
        variables: name of each variable that was set -> its value before; ``None`` if it had none.
    """

    def __init__(self) -> None:
        self._imports = ImportCallbacks()
        self._requested: set[tuple[str, str]] = set()
        self._restorers: list[Callable[[], None]] = []
        self._functions: list[_ReplacedFunction] = []
        self._num_passed = 0  # of _functions, to the modules that have imported them
        self._is_installing = False
        self.variables: dict[str, str | None] = {}

    def install(self, *groups: Group) -> None:
        self._is_installing = True
        try:
            for hook in (hook for group in groups for hook in HOOKS[group]):
                if (hook.replacement, hook.target) not in self._requested:
                    self._requested.add((hook.replacement, hook.target))
                    self._imports.add(hook.module, functools.partial(self._replace, hook))
        finally:
            self._is_installing = False
            self._pass_to_importers()

    def _replace(self, hook: Hook, module: ModuleType) -> None:
        owner = getattr(module, hook.class_name, None) if hook.class_name else module
        name = hook.name_in(owner)
        if name is not None:
            self._replace_attribute(hook, owner, name)
            if not self._is_installing:
                self._pass_to_importers()
        else:
            error = missing_name_error(hook.contract)
            if hook.without == "refused":
                raise error
            print_once(off_warning(error))

    def _replace_attribute(self, hook: Hook, owner: Any, name: str) -> None:
        """Replace an attribute of a module or class by that of ``hook``."""
        inherited = name not in vars(owner)
        # Without binding: getattr of a method of C++ returns a function that cannot be put back.
        original = inspect.getattr_static(owner, name)
        installed = [hook]
        if hook.direct:
            attribute = functools.wraps(original)(_replacement(hook)(original))
        else:
            attribute = _replacing_attribute(hook, owner, original, installed)
        setattr(owner, name, attribute)
        if not hook.class_name and original.__module__ == hook.module:
            self._functions.append(_ReplacedFunction(name=name, original=original, replacement=attribute))

        def restore() -> None:
            installed.clear()
            if vars(owner).get(name) is attribute:
                delattr(owner, name) if inherited else setattr(owner, name, original)

        self._restorers.append(restore)

    def _pass_to_importers(self) -> None:
        """Replace functions also where modules of other libraries have imported them by name.

        Modules that import them later get the replacement.
        """
        new, self._num_passed = self._functions[self._num_passed :], len(self._functions)
        _rebind({id(each.original): (each.name, each.replacement) for each in new})

    def remove(self) -> None:
        """Restore every original."""
        self._imports.close()
        for restore in reversed(self._restorers):
            restore()
        _rebind({id(each.replacement): (each.name, each.original) for each in self._functions})
        self._num_passed = 0
        self._functions.clear()
        self._restorers.clear()
        self._requested.clear()

    def set_variables(self, **variables: str) -> None:
        """Set environment variables until :meth:`restore_variables`."""
        changed = {name: value for name, value in variables.items() if os.environ.get(name) != value}
        self.variables = {**{name: os.environ.get(name) for name in changed}, **self.variables}
        _set_or_remove(changed)

    def restore_variables(self) -> None:
        _set_or_remove(self.variables)
        self.variables.clear()

    def close(self) -> None:
        """Restore functions and variables."""
        self.remove()
        self.restore_variables()


def _replacing_attribute(hook: Hook, owner: Any, original: Any, installed: list[Hook]) -> Any:
    """Return the attribute in place of ``original``: it calls the replacement if FSDP is asked for, or always.

    Args:
        installed: empty after the hook was removed. Other code may have wrapped the replacement, which calls only the
            original from then on.
    """
    is_wrapped = isinstance(original, staticmethod | classmethod)
    is_method = bool(hook.class_name) and not isinstance(original, staticmethod)
    function: Callable[..., Any] = original.__func__ if is_wrapped else original
    always = hook.always

    @functools.wraps(function)
    def replacing(*args: Any, **kwargs: Any) -> Any:
        settings = session()
        if settings.waits_for_call:
            settings.start_deferred()
        if not installed or not (always or settings.is_active()):
            return function(*args, **kwargs)
        if is_method and not args:  # torch binds methods with functools.partial(method, self=module)
            args = (kwargs.pop("self"),)
        bound = functools.partial(function, args[0]) if is_method else function
        return _replacement(hook)(bound, *args, **kwargs)

    return type(original)(replacing) if is_wrapped else replacing


def _rebind(functions: Mapping[int, tuple[str, Any]]) -> None:
    """Replace functions in all modules but those of this package. There are thousands of modules, so it is one pass.

    Args:
        functions: ``id`` of each function -> the name by which modules have imported it, and what to put there.
    """
    names = {name for name, _ in functions.values()}
    own = __name__.partition(".")[0]
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or (variables := vars(module)).keys().isdisjoint(names):
            continue
        # Objects that a library puts in place of a module may have no name.
        if str(variables.get("__name__", "")).partition(".")[0] == own:
            continue
        for name in variables.keys() & names:
            found = functions.get(id(variables[name]))
            if found is not None and found[0] == name:
                setattr(module, name, found[1])


changes = process.owns(ProcessChanges)


@functools.cache
def _replacement(hook: Hook) -> Callable[..., Any]:
    """Import and return the replacement. It is imported at its first call, because it may import the whole library."""
    module, _, name = hook.replacement.partition(":")
    return getattr(importlib.import_module(f".{module}", __package__), name)


_RAM_EFFICIENT: Final = "FSDP_CPU_RAM_EFFICIENT_LOADING"
_EFFICIENT: Final = ("ACCELERATE_USE_FSDP", _RAM_EFFICIENT)
"""Variables that are true while ``from_pretrained`` loads RAM-efficiently."""


def _set_or_remove(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def set_loading_variables(spec: FsdpSpec) -> None:
    """Set whether ``from_pretrained``, which reads environment variables only, loads RAM-efficiently."""
    changes().set_variables(**{_RAM_EFFICIENT: str(spec.loading.ram_efficient).lower()})
    if spec.loading.ram_efficient:
        changes().set_variables(ACCELERATE_USE_FSDP="true")
    changes().install("loading")


def has_fsdp_settings() -> bool:
    """Return whether this process has read FSDP settings, so that ``from_pretrained`` loads a model for them."""
    return _RAM_EFFICIENT in changes().variables or loads_ram_efficiently()


def loading_ram_efficiently() -> AbstractContextManager[None]:
    """Load RAM-efficiently in the block, whatever the settings are."""
    changes().install("loading")
    return entries_in_block(dict.fromkeys(_EFFICIENT, "true"), os.environ)


def loads_ram_efficiently() -> bool:
    """Return whether a launcher, a plugin or :func:`set_loading_variables` has enabled RAM-efficient loading."""
    return all(map(is_true, _EFFICIENT))


def is_true(name: str) -> bool:
    """Return whether an environment variable is set to a word for true."""
    return os.environ.get(name, "").lower() in TRUE_WORDS
