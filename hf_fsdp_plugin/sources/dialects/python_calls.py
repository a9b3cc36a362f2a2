"""Finds calls in a Python script, and the values of their arguments, without running the script."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from hf_fsdp_plugin.sources.dialects.interface import DialectDocument, DialectReading
from hf_fsdp_plugin.sources.tree import ConfigEntry, from_python
from hf_fsdp_plugin.text import shorten

_MAX_DEPTH: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptPart:
    """A call or a command of a script.

    Attributes:
        name: its name for messages.
        first, last: its lines.
        entries: the arguments of a call. A name that the script assigns once has the value of the assignment; other
            names and attributes are text. A call in an argument is a mapping with ``class_path`` and ``init_args``, as
            in the files of LightningCLI.
    """

    name: str
    first: int
    last: int
    entries: tuple[ConfigEntry, ...] = ()

    def mark(self) -> ConfigEntry:
        """Return the entry of the part, by which its dialect is recognized."""
        return ConfigEntry(key=self.name, line=self.first, value=from_python(self.name))


Part = TypeVar("Part", bound=ScriptPart)


def find_calls(document: DialectDocument, names: Collection[str]) -> list[ScriptPart]:
    """Return the calls of functions and classes with these names in a Python file, in the order of their lines."""
    if document.file is None or document.file.path.suffix.lower() != ".py":
        return []
    try:
        tree = ast.parse(document.text)
        values = _assignments(tree)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _last_name(node.func) in names]
        return [_part(call, values) for call in sorted(calls, key=lambda call: call.lineno)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def choose_part(reading: DialectReading, parts: Sequence[Part], noun: str) -> Part | None:
    """Return the only part, or that of the line which the user gave, or report that there are several."""
    file = reading.document.file
    start = None if file is None else file.start
    chosen = [part for part in parts if start is None or part.first <= start <= part.last]
    if len(chosen) == 1:
        return chosen[0]
    places = ", ".join(f"line {part.first} ({shorten(part.name, 60)})" for part in parts)
    message = f"the script has {len(parts)} {noun}: {places}."
    if start is not None and not chosen:
        message = f"line {start} is not in one of the {noun}: {places}."
    fix = f"Give the line of one of them: {reading.source}:{parts[-1].first}."
    reading.report("FSDP-E074", parts[0].mark(), message, fix)
    return None


def _assignments(tree: ast.Module) -> Mapping[str, ast.expr]:
    """Return the value of each name that is assigned exactly once."""
    values: dict[str, ast.expr | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    values[target.id] = None if target.id in values else node.value
    return {name: value for name, value in values.items() if value is not None}


def _part(call: ast.Call, values: Mapping[str, ast.expr]) -> ScriptPart:
    entries = [
        ConfigEntry(key=name, line=node.lineno, value=from_python(_value_of(node, values)))
        for name, node in _arguments(call)
    ]
    last = call.end_lineno or call.lineno
    return ScriptPart(name=_last_name(call.func), first=call.lineno, last=last, entries=tuple(entries))


def _arguments(call: ast.Call) -> list[tuple[str, ast.expr]]:
    """Return the arguments of a call: positional ones have their number as name, ``**options`` is ``**``."""
    positional = [(str(position), node) for position, node in enumerate(call.args)]
    return positional + [(keyword.arg or "**", keyword.value) for keyword in call.keywords]


def _value_of(node: ast.expr, values: Mapping[str, ast.expr], depth: int = 0) -> Any:
    """Return a literal, the text of a name, or a list or mapping of such values."""
    if depth > _MAX_DEPTH:
        return ast.unparse(node)
    if isinstance(node, ast.Name):
        return _value_of(values[node.id], values, depth + 1) if node.id in values else node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Set | ast.List | ast.Tuple):
        return [_value_of(item, values, depth + 1) for item in node.elts]
    if isinstance(node, ast.Dict):
        pairs = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
        return {str(_value_of(key, values, depth + 1)): _value_of(value, values, depth + 1) for key, value in pairs}
    if isinstance(node, ast.Call):
        arguments = {name: _value_of(value, values, depth + 1) for name, value in _arguments(node)}
        return {"class_path": _last_name(node.func), "init_args": arguments}
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ast.unparse(node)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
