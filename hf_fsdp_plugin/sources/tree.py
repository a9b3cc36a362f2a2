"""``Node``: a config as a tree with line numbers, from a file or from Python objects."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hf_fsdp_plugin.spellings import BLANKS

MAX_TEXT = 80
MAX_NODES = 20_000
MAX_DEPTH = 20
MAX_BITS = 2048
"""Limits of a config. A larger one is most likely not a config."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A key of a mapping, with its 1-based line.

    Attributes:
        is_switch: whether the key is a flag without a value, so that the user did not write ``value``.
    """

    key: str
    line: int | None
    value: Node
    is_switch: bool = False


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
        value = self.value.strip(BLANKS) if isinstance(self.value, str) else self.value
        return value is None or value in ("", ())

    @property
    def shown(self) -> str:
        """The value for messages. Strings are quoted, and empty lists and mappings have brackets."""
        if isinstance(self.value, tuple) and not self.value:
            return "{}" if self.is_mapping else "[]"
        return repr(self.text) if isinstance(self.value, str) else self.text

    def plain(self) -> Any:
        """Return the tree as Python objects, without lines."""
        if isinstance(self.value, Entries):
            return {entry.key: entry.value.plain() for entry in self.value}
        if isinstance(self.value, tuple):
            return [item.plain() for item in self.value]
        return self.value


class ObjectText(str):
    """The text of an object such as a dtype, which may be a choice, but is not text that a user wrote."""

    __slots__ = ()


class Entries(tuple[Entry, ...]):
    """The entries of a mapping, in their original order."""

    __slots__ = ()


def shorten(text: str) -> str:
    """Return the text as one line of at most ``MAX_TEXT`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"


def from_python(value: Any, *, line: int | None = None, depth: int = 0) -> Node:
    """Return the tree of a Python object. Enums and classes become text, as in a file.

    Raises:
        ValueError: the object is nested more than ``MAX_DEPTH`` levels deep.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"the object is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, Mapping):
        entries = Entries(
            Entry(key=_text(key), line=line, value=from_python(item, line=line, depth=depth + 1))
            for key, item in value.items()
        )
        return Node(value=entries, line=line, text=text_of_mapping(entries))
    if isinstance(value, (list, tuple, Set)):
        items = sorted(value, key=_text) if isinstance(value, Set) else value
        nodes = tuple(from_python(item, line=line, depth=depth + 1) for item in items)
        return Node(value=nodes, line=line, text=shorten(", ".join(node.text for node in nodes)))
    scalar = _scalar(value)
    return Node(value=scalar, line=line, text=shorten(_text(scalar)))


def text_of_mapping(entries: Sequence[Entry]) -> str:
    """Return the first entries as text, for messages."""
    return shorten("{" + ", ".join(f"{entry.key}: {entry.value.text}" for entry in entries[:5]) + "}")


def _scalar(value: Any) -> Any:
    if isinstance(value, Enum):  # the values of torch's enums are numbers
        return str(value.value) if isinstance(value.value, str) else value.name
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return ObjectText(f"an integer of {value.bit_length():,} bits")  # Python may refuse to convert it to text
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, type):
        return value.__name__
    try:
        return operator.index(value)
    except TypeError:
        return ObjectText(_text(value))


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # an integer of more digits than Python converts, or an object whose __str__ fails
        return f"a value of the type {type(value).__name__}"
