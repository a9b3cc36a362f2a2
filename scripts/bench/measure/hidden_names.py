"""Hides names of other libraries from this package, as if a new version had renamed them. The libraries still see them.

Import it before ``hf_fsdp_plugin``, which then finds no such name when it is imported.
"""

from __future__ import annotations

import enum
import importlib
import sys
import types
from collections.abc import Callable, Collection
from typing import Any

PACKAGE = "hf_fsdp_plugin"


def hide(module: str, path: str) -> None:
    """Hide ``name`` of a module, or ``Class.attribute``."""
    *parents, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    if parents == ["FlatParameter"]:  # torch creates plain parameters, which only look like objects of this class
        vars(owner)["__annotations__"].pop(name, None)
        owner = owner.__mro__[1]
    if isinstance(owner, types.ModuleType):
        _hide_in_module(owner, {name})
    elif isinstance(owner, type):
        _hide_in_class(owner, name)
    else:
        _hide_in_instances(type(owner), {name}, only=owner)


def _asked_by_package(depth: int = 2) -> bool:
    return str(sys._getframe(depth).f_globals.get("__name__", "")).startswith(PACKAGE)


def _refuse(owner: object, name: str) -> AttributeError:
    return AttributeError(f"{owner!r} has no attribute {name!r}", name=name, obj=owner)


def _hide_in_module(module: types.ModuleType, names: Collection[str]) -> None:
    class Hiding(type(module)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in names and _asked_by_package():
                raise _refuse(self, name)
            return super().__getattribute__(name)

        def __getattr__(self, name: str) -> Any:  # the modules of torch's configuration have one, which is asked next
            if name in names and _asked_by_package():
                raise _refuse(self, name)
            inherited = getattr(super(), "__getattr__", None)
            if inherited is None:
                raise _refuse(self, name)
            return inherited(name)

    # Those modules also have a `__setattr__`, which refuses this name.
    types.ModuleType.__setattr__(module, "__class__", Hiding)


def _hide_in_class(cls: type, name: str) -> None:
    """Hide an attribute of a class and of its instances."""
    for base in cls.__mro__:
        vars(base).get("__annotations__", {}).pop(name, None)
    if isinstance(cls, enum.EnumMeta):
        _hide_in_enum(cls, name)
    elif any(name in vars(base) for base in cls.__mro__):
        original = next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
        setattr(cls, name, _HiddenAttribute(name, original))
    else:
        _hide_in_instances(cls, {name})


class _HiddenAttribute:
    """A method, property or value of a class that this package does not find."""

    def __init__(self, name: str, original: Any) -> None:
        self._name, self._original = name, original

    def __get__(self, instance: object, owner: type) -> Any:
        if _asked_by_package():
            raise _refuse(owner if instance is None else instance, self._name)
        get = getattr(type(self._original), "__get__", None)
        return self._original if get is None else get(self._original, instance, owner)

    def __set__(self, instance: object, value: Any) -> None:
        put = getattr(type(self._original), "__set__", None)
        if put is not None:
            put(self._original, instance, value)
        else:
            vars(instance)[self._name] = value


def _hide_in_enum(cls: enum.EnumMeta, name: str) -> None:
    original: Callable[..., Any] = enum.EnumMeta.__getattribute__

    def get(self: Any, asked: str) -> Any:
        if self is cls and asked == name and _asked_by_package():
            raise _refuse(self, asked)
        return original(self, asked)

    enum.EnumMeta.__getattribute__ = get  # type: ignore[method-assign]


def _hide_in_instances(cls: type, names: Collection[str], only: object = None) -> None:
    original = cls.__getattribute__

    def __getattribute__(self: Any, name: str) -> Any:
        if name in names and (only is None or self is only) and _asked_by_package():
            raise _refuse(self, name)
        return original(self, name)

    cls.__getattribute__ = __getattribute__  # type: ignore[method-assign]
