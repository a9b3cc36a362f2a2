"""The tables that ``tables.yaml`` describes."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml


class _Formatter(string.Formatter):
    """``{NAME/1e9}`` divides, ``{NAME:=1?TEXT}`` is a text for the value 1, ``{NAME!b}`` adds blanks to commas."""

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return str(value).replace(",", ", ") if conversion == "b" else super().convert_field(value, conversion)

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        path, _, divisor = field_name.partition("/")
        value, used = super().get_field(path, args, kwargs)
        return value / float(divisor) if divisor else value, used

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec.startswith("="):
            wanted, _, text = format_spec[1:].partition("?")
            return text if str(value) == wanted else ""
        return str(super().format_field(value, format_spec))


_format: Final = _Formatter().vformat


def _rows(tree: Any, path: Sequence[str], keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each row at the end of a path, with the keys of its ``*``."""
    if not path:
        yield keys, tree
    elif path[0] != "*":
        yield from _rows(tree[path[0]], path[1:], keys)
    else:
        items = tree.items() if isinstance(tree, dict) else ((None, each) for each in tree)
        for key, each in items:
            yield from _rows(each, path[1:], keys if key is None else (*keys, key))


def described(table: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table of ``tables.yaml``."""
    cells = table.get("cells", {})
    head = table.get("head", list(cells))
    lines = [line for text in table.get("above", ()) for line in (_format(text, (), result), "")]
    lines += [f"|{'|'.join(f' {title} ' if title else ' ' for title in head)}|", "|" + "---|" * len(head)]
    if "rows" in table:
        for keys, row in _rows(result, table["rows"].split(".")):
            lines.append(f"| {' | '.join(_format(cell, keys, row) for cell in cells.values())} |")
    for title, cell in table.get("lines", {}).items():
        lines.append(f"| {_format(title, (), result)} | {_format(cell, (), result)} |")
    for text in table.get("below", ()):
        lines += ["", _format(text, (), result)]
    return lines


DESCRIBED: Final[dict[str, Callable[[Any], list[str]]]] = {
    name: partial(described, table)
    for name, table in yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8")).items()
}
