"""Installs and removes the hooks of :mod:`hf_fsdp_plugin.integrations.hooks`."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, TypeVar

from hf_fsdp_plugin.contracts import missing, warn_off
from hf_fsdp_plugin.integrations.hooks import HOOKS, Group, Hook
from hf_fsdp_plugin.integrations.import_hooks import ImportCallbacks
from hf_fsdp_plugin.integrations.session import session

_OVERRIDDEN: Final = "_hf_fsdp_overridden_class"
"""Attribute of a subclass that already overrides the hooked methods. Its value is the hooked class."""


class InstalledHooks:
    """The hooks of one process. A hook is installed once, now or right after its module is imported."""

    def __init__(self) -> None:
        self._imports = ImportCallbacks()
        self._requested: set[tuple[str, str]] = set()
        self._subclasses: set[tuple[type, str]] = set()
        self._restorers: list[Callable[[], None]] = []

    def install(self, *groups: Group) -> None:
        for hook in (hook for group in groups for hook in HOOKS[group]):
            if (hook.target, hook.replacement) not in self._requested:
                self._requested.add((hook.target, hook.replacement))
                self._imports.add(hook.module, functools.partial(self._replace, hook))

    def install_in_subclass(self, target: str, subclass: type) -> None:
        """Replace a method that a subclass overrides without calling the hooked one.

        Args:
            target: the target of the hook, a method of a base class.
        """
        hook = next(hook for hooks in HOOKS.values() for hook in hooks if hook.target == target)
        if (subclass, target) not in self._subclasses:
            self._subclasses.add((subclass, target))
            self._restorers.append(_replace(hook, subclass))

    def _replace(self, hook: Hook, module: ModuleType) -> None:
        owner = getattr(module, hook.class_name, None) if hook.class_name else module
        found = hook.of(owner)
        if found is None:
            _report_missing(hook)
        else:
            self._restorers.append(_replace(found, owner))

    def remove(self) -> None:
        """Restore every original."""
        self._imports.close()
        for restore in reversed(self._restorers):
            restore()
        self._restorers.clear()
        self._requested.clear()
        self._subclasses.clear()


def _report_missing(hook: Hook) -> None:
    """Warn that a library has no such function, or refuse the library."""
    if not hook.optional:
        error = missing(hook.contract)
        if hook.without == "refused":
            raise error
        warn_off(error)


def _replace(hook: Hook, owner: Any) -> Callable[[], None]:
    """Replace the target of ``hook``, in its module or class. Returns a function that restores the original."""
    if hook.direct:
        return _replace_directly(hook, owner)
    if hook.name == "__new__" and hook.name not in vars(owner):
        define_new(owner)
    inherited = hook.name not in vars(owner)
    original = inspect.getattr_static(owner, hook.name)
    is_static, is_class = isinstance(original, staticmethod), isinstance(original, classmethod)
    is_method = bool(hook.class_name) and not is_static
    is_overridable = is_method and hook in HOOKS["transformers"]
    function: Callable[..., Any] = original.__func__ if is_static or is_class else original
    always, active = hook.always, True

    @functools.wraps(function)
    def replacing(*args: Any, **kwargs: Any) -> Any:
        if session.waits_for_call:
            session.start_deferred()
        if not active or not (always or session.is_active()):
            return function(*args, **kwargs)
        if is_method and not args:  # torch binds methods with functools.partial(method, self=module)
            args = (kwargs.pop("self"),)
        if is_overridable and getattr(args[0], _OVERRIDDEN, None) is owner:
            return function(*args, **kwargs)
        bound = functools.partial(function, args[0]) if is_method else function
        return _replacement(hook)(bound, *args, **kwargs)

    attribute: Any = replacing
    if is_static or is_class:
        attribute = type(original)(replacing)
    for each in [owner, *_importers(hook, original)]:
        setattr(each, hook.name, attribute)

    def restore() -> None:
        nonlocal active
        active = False  # other code may have wrapped the replacement, which calls only the original from now on
        for each in [owner, *_importers(hook, attribute)]:
            if vars(each).get(hook.name) is attribute and inherited:
                delattr(each, hook.name)
            elif vars(each).get(hook.name) is attribute:
                setattr(each, hook.name, original)

    return restore


def _replace_directly(hook: Hook, owner: Any) -> Callable[[], None]:
    # Without binding: getattr of a method of C++ returns a function that cannot be put back.
    original = inspect.getattr_static(owner, hook.name)
    replacing = functools.wraps(original)(_replacement(hook)(original))
    for each in [owner, *_importers(hook, original)]:
        setattr(each, hook.name, replacing)

    def restore() -> None:
        for each in [owner, *_importers(hook, replacing)]:
            if vars(each)[hook.name] is replacing:
                setattr(each, hook.name, original)

    return restore


def _importers(hook: Hook, function: Any) -> list[ModuleType]:
    """Return the modules, of any library, that have imported a function by name from the module that defines it.

    Modules that import it later get the replacement.
    """
    if hook.class_name or function.__module__ != hook.module:
        return []
    name = hook.name
    modules = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType) and vars(m).get(name) is function]
    return [m for m in modules if _name(m) != hook.module and not _is_own(m)]


def _name(module: ModuleType) -> str:
    return str(vars(module).get("__name__", ""))  # objects that a library puts in place of a module may have no name


def _is_own(module: ModuleType) -> bool:
    return _name(module).partition(".")[0] == __name__.partition(".")[0]


def define_new(owner: Any) -> None:
    """Give a class a ``__new__`` that calls the inherited one, so that a hook can replace it.

    It is never deleted: CPython would refuse all arguments of the class's constructor afterwards (bpo-5322).
    """

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        inherited: Any = super(owner, cls).__new__
        return inherited(cls) if inherited is object.__new__ else inherited(cls, *args, **kwargs)

    _show_arguments(new, owner)
    owner.__new__ = staticmethod(new)


def _show_arguments(new: Any, owner: Any) -> None:
    """Let ``inspect.signature`` of a class with this ``__new__`` return the arguments of ``owner.__init__``."""
    new.__wrapped__ = owner.__init__


_installed = InstalledHooks()
install_hooks = _installed.install
install_in_subclass = _installed.install_in_subclass
remove_hooks = _installed.remove

T = TypeVar("T", bound=type)


def override_hooked_methods(base: type) -> Callable[[T], T]:
    """Class decorator: give a subclass or mixin of ``base`` a method for each hooked method of ``base``.

    Instances of the class run each replacement exactly once, whether or not the hooks of ``base`` are installed. A
    method that ``base`` lacks is left out, as when the hooks are installed.
    """

    def decorate(cls: T) -> T:
        for hook in HOOKS["transformers"]:
            is_own = hook.target == f"{base.__module__}:{base.__name__}.{hook.name}"
            if is_own and hasattr(base, hook.name):
                setattr(cls, hook.name, _overriding_method(hook, cls, getattr(base, hook.name)))
        setattr(cls, _OVERRIDDEN, base)
        return cls

    return decorate


def _overriding_method(hook: Hook, cls: type, overridden: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(overridden)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _replacement(hook)(getattr(super(cls, self), hook.name), self, *args, **kwargs)

    if hook.name == "__new__":
        _show_arguments(method, cls)
        return staticmethod(method)
    return method


@functools.cache
def _replacement(hook: Hook) -> Callable[..., Any]:
    """Import and return the replacement. It is imported at its first call, because it may import the whole library."""
    module, _, name = hook.replacement.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return function
