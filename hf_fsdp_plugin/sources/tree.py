"""``Node``: a config as a tree with line numbers, from a file or from Python objects."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any

MAX_TEXT = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A key of a mapping, with its 1-based line."""

    key: str
    line: int | None
    value: Node


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node of the tree: a scalar, a tuple of nodes, or the entries of a mapping.

    Attributes:
        text: the value as written, shortened, for messages.
    """

    value: Any
    line: int | None = None
    text: str = ""

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.value, Entries)

    @property
    def is_empty(self) -> bool:
        """Whether the value is null, a blank string, or an empty list or mapping."""
        value = self.value.strip() if isinstance(self.value, str) else self.value
        return value is None or value in ("", ())

    def plain(self) -> Any:
        """Return the tree as Python objects, without lines."""
        if isinstance(self.value, Entries):
            return {entry.key: entry.value.plain() for entry in self.value}
        if isinstance(self.value, tuple):
            return [item.plain() for item in self.value]
        return self.value


class Entries(tuple[Entry, ...]):
    """The entries of a mapping, in their original order."""

    __slots__ = ()


def shorten(text: str) -> str:
    """Return the text as one line of at most ``MAX_TEXT`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"


def from_python(value: Any, *, line: int | None = None, depth: int = 0) -> Node:
    """Return the tree of a Python object. Enums, classes and dtypes become text, as in a file.

    Raises:
        ValueError: the object is nested more than 20 levels deep.
    """
    if depth > 20:
        raise ValueError("the object is nested more than 20 levels deep")
    if isinstance(value, Mapping):
        entries = Entries(
            Entry(key=str(key), line=line, value=from_python(item, line=line, depth=depth + 1))
            for key, item in value.items()
        )
        return Node(value=entries, line=line, text=shorten(repr(dict(value))))
    if isinstance(value, (list, tuple, Set)):
        items = sorted(value, key=str) if isinstance(value, Set) else value
        nodes = tuple(from_python(item, line=line, depth=depth + 1) for item in items)
        return Node(value=nodes, line=line, text=", ".join(node.text for node in nodes))
    scalar = _scalar(value)
    return Node(value=scalar, line=line, text=shorten(str(scalar)))


def _scalar(value: Any) -> Any:
    if isinstance(value, Enum):  # the values of torch's enums are numbers
        return str(value.value) if isinstance(value.value, str) else value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, type):
        return value.__name__
    try:
        return operator.index(value)
    except TypeError:
        return str(value)
