"""The state of this process, and of a model, an optimizer or an accelerator: each is one object, with typed parts.

A part is an object of a class of this package, such as the session or the record of collectives, and there is one of
each class. The module with the class declares the part and exports the function that returns it; the part is created
at the first call::

    session = process.owns(Session)
    ...
    session().ambient

:data:`process` is the only mutable object at the level of a module. ``uninstall()`` closes and drops its parts, the
newest first, so that the next ``install()`` begins with new ones. A few parts are kept, because what they describe
outlives the plugin: models stay sharded, and the run of a process counts on.

What belongs to an object of the user or of a library is part of :func:`parts_of` of that object. It is found from the
object, also through wrappers that forward attributes (``torch.compile``, PEFT), and lives as long as it. Copies and
pickles of the object have none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, TypeVar

T = TypeVar("T")
_PARTS: Final = "_hf_fsdp_parts"
"""Attribute of an object with its :class:`Parts`."""


class Parts:
    """Parts of which there is at most one of each class."""

    def __init__(self) -> None:
        self._parts: dict[Any, Any] = {}

    def get(self, kind: Callable[[], T]) -> T:
        """Return the part of a class, which is created without arguments at the first call."""
        part = self._parts.get(kind)
        if part is None:  # setdefault: another thread may create it meanwhile
            part = self._parts.setdefault(kind, kind())
        found: T = part
        return found

    def find(self, kind: type[T]) -> T | None:
        """Return the part of a class; ``None`` if there is none."""
        return self._parts.get(kind)

    def put(self, part: object) -> None:
        """Add a part, in place of an earlier one of its class."""
        self._parts[type(part)] = part

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()  # a file can be read without this package, and a copy begins without parts


class Process(Parts):
    """What belongs to this process."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: set[Any] = set()

    def owns(self, kind: Callable[[], T], *, kept: bool = False) -> Callable[[], T]:
        """Declare a part, and return the function that returns it.

        Args:
            kind: the class of the part, or a function that creates it.
            kept: whether :meth:`close` keeps the part after it has closed it.
        """
        if kept:
            self._kept.add(kind)
        return functools.partial(self.get, kind)

    def end(self, kind: Any) -> None:
        """Close a part if it exists and has a method ``close``, and drop it unless it is kept."""
        try:
            if (close := getattr(self._parts.get(kind), "close", None)) is not None:
                close()
        finally:
            if kind not in self._kept:
                self._parts.pop(kind, None)

    def close(self) -> None:
        """End all parts, the newest first. An error of one does not keep the others open."""
        with ExitStack() as stack:
            for kind in list(self._parts):
                stack.callback(self.end, kind)
        if self._parts.keys() - self._kept:  # a part that was closed has asked for another one
            self.close()


process = Process()


def parts_of(owner: Any) -> Parts:
    """Return the state of an object, or of the object that it wraps if that has one. Created at the first call."""
    found = getattr(owner, _PARTS, None)
    return found if isinstance(found, Parts) else own_parts(owner)


def own_parts(owner: Any) -> Parts:
    """Return the state of an object itself, such as a wrapper that is not the object that it wraps."""
    found = vars(owner).get(_PARTS)
    if not isinstance(found, Parts):
        found = Parts()
        object.__setattr__(owner, _PARTS, found)
    return found


def find_part(owner: Any, kind: type[T]) -> T | None:
    """Return a part of what :func:`parts_of` returns; ``None`` if there is none. Creates nothing."""
    found = getattr(owner, _PARTS, None)
    return found.find(kind) if isinstance(found, Parts) else None
