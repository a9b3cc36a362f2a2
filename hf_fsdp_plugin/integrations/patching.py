"""Install and remove the rows of the table of hooks."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, TypeVar

from hf_fsdp_plugin.integrations.hooks import HOOKS, Group, Hook
from hf_fsdp_plugin.integrations.import_hooks import cancel_callbacks, when_imported

_OVERRIDDEN: Final = "_hf_fsdp_overridden_class"
"""Attribute of a subclass that overrides the hooked methods itself; its value is the hooked class."""


class _Patch:
    """One row, applied to its owner: the class or the module whose attribute is replaced."""

    def __init__(self, hook: Hook, module: ModuleType) -> None:
        self.hook = hook
        self.owner: Any = getattr(module, hook.class_name) if hook.class_name else module
        self.original = vars(self.owner)[hook.name]
        self.active = True
        self.replacing = self._method() if inspect.isfunction(self.original) and hook.class_name else self._function()
        setattr(self.owner, hook.name, self.replacing)

    def remove(self) -> None:
        """Restore the original. A replacing function that other code has wrapped calls the original from now on."""
        self.active = False
        if vars(self.owner)[self.hook.name] is self.replacing:
            setattr(self.owner, self.hook.name, self.original)

    def _method(self) -> Any:
        @functools.wraps(self.original)
        def method(instance: Any, *args: Any, **kwargs: Any) -> Any:
            bound = self.original.__get__(instance, type(instance))
            if not self.active or getattr(instance, _OVERRIDDEN, None) == self.hook.class_name:
                return bound(*args, **kwargs)
            return _replacement(self.hook)(bound, instance, *args, **kwargs)

        return method

    def _function(self) -> Any:
        static = isinstance(self.original, staticmethod)
        original = self.original.__func__ if static else self.original

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            return _replacement(self.hook)(original, *args, **kwargs) if self.active else original(*args, **kwargs)

        return staticmethod(function) if static else function


class InstalledHooks:
    """The hooks of one process. A row is installed once, now or right after its module is imported."""

    def __init__(self) -> None:
        self._requested: set[str] = set()
        self._patches: list[_Patch] = []

    def install(self, *groups: Group) -> None:
        for hook in HOOKS:
            if hook.group in groups and hook.target not in self._requested:
                self._requested.add(hook.target)
                when_imported(hook.module, functools.partial(self._apply, hook))

    def _apply(self, hook: Hook, module: ModuleType) -> None:
        self._patches.append(_Patch(hook, module))

    def remove(self) -> None:
        """Restore every original."""
        cancel_callbacks()
        for patch in reversed(self._patches):
            patch.remove()
        self._patches.clear()
        self._requested.clear()


_installed = InstalledHooks()
install_hooks = _installed.install
remove_hooks = _installed.remove

T = TypeVar("T", bound=type)


def override_hooked_methods(base: type) -> Callable[[T], T]:
    """Class decorator: give a subclass or mixin of ``base`` a method for each hooked method of ``base``.

    Instances of the class then run the replacements once, whether or not the hooks of ``base`` are installed.
    """

    def decorate(cls: T) -> T:
        for hook in HOOKS:
            if hook.target == f"{base.__module__}:{base.__name__}.{hook.name}":
                setattr(cls, hook.name, _overriding_method(hook, cls, getattr(base, hook.name)))
        setattr(cls, _OVERRIDDEN, base.__name__)
        return cls

    return decorate


def _overriding_method(hook: Hook, cls: type, overridden: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(overridden)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _replacement(hook)(getattr(super(cls, self), hook.name), self, *args, **kwargs)

    return method


@functools.cache
def _replacement(hook: Hook) -> Callable[..., Any]:
    """Import the replacement; at its first call, as it may import the whole library."""
    module, _, name = hook.replacement.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return function
