"""Formats counts, sizes, lists of names and tables. Imports nothing from this package: any module can use it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

_UNPRINTABLE = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")
"""Control characters, line separators, marks that reverse the direction of text, and surrogates."""
_MIN_CELL = 8
"""Smallest width to which a cell of a table is shortened."""


def printable(text: str) -> str:
    """Escape what changes a terminal or the line structure of the output: ``\\u001b`` for ESC.

    Names, files and other processes can contain any character. All text from them is printed through this function;
    it is called by ``Problem.text``, by tables and by the JSON output.
    """
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def format_bytes(num_bytes: int) -> str:
    """Format the size of a file in powers of 1000 with three significant digits: ``2.03 GB``."""
    size, unit = _scale(num_bytes, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))
    return f"{num_bytes} B" if unit == "B" else _three_digits(size, unit)


def format_memory(num_bytes: int) -> str:
    """Format an amount of memory in powers of 1024 with one decimal: ``513.3 MiB``."""
    size, unit = _scale(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def format_count(count: int) -> str:
    """Format a number of parameters with three significant digits: ``3.54 M``."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return _three_digits(count / size, unit)
    return str(count)


def format_dtype(dtype: object) -> str:
    """Return torch's name of a dtype without its module: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


SHORT_DTYPES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""Torch's name of a dtype -> its name in the spec, the plan and messages."""


def short_dtype(dtype: object) -> str:
    """Return ``fp32``, ``bf16`` or ``fp16`` for a dtype or torch's name of it; torch's name for other dtypes."""
    name = format_dtype(dtype)
    return SHORT_DTYPES.get(name, name)


def format_value(value: Any, empty: str = "-") -> str:
    """Return a value of a setting as text; `empty` for an empty text, list or mapping."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return printable(", ".join(map(str, value))) or empty
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={format_value(item)}" for key, item in value.items()) or empty
    return printable(str(value)) or empty


def format_names(names: Collection[object], limit: int = 4) -> str:
    """Join the first `limit` names: ``a, b, c, d and 3 more``."""
    shown = [str(name) for name in names][:limit]
    rest = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(shown) + rest


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, or ``ranks 0, 1, 5``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_names(ranks, 16)}"


def format_shape(shape: Iterable[int]) -> str:
    """Format the shape of a tensor: ``32×16``; ``scalar`` if it has no dims."""
    return "×".join(map(str, shape)) or "scalar"


def format_table(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), width: int | None = None) -> str:
    """Align the columns of a table, and shorten the longest cells until a row has at most `width` columns.

    Control characters in cells are escaped.

    Args:
        rows: cells of each row. All rows must have the same length.
        right: indices of the columns that are aligned to the right.
        width: columns of the terminal; ``None`` for no limit.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    excess = sum(widths) + 2 * (len(widths) - 1) - width if width is not None else 0
    while excess > 0:
        longest = max(range(len(widths)), key=widths.__getitem__)
        others = [other for number, other in enumerate(widths) if number != longest]
        target = min(max(widths[longest] - excess, *others, _MIN_CELL), widths[longest] - 1)
        if target < _MIN_CELL:
            break  # the terminal is too narrow for any table
        excess -= widths[longest] - target
        widths[longest] = target
    lines = []
    for row in rows:
        shown = [shorten(cell, size) for cell, size in zip(row, widths, strict=True)]
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(shown, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Return the count with its noun: ``1 rank``, ``1,024 ranks``.

    Args:
        nouns: the plural, if it is not ``noun + "s"``.
    """
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def shorten(text: str, width: int) -> str:
    """Replace the middle of a text that is longer than `width` by ``…``."""
    return text if len(text) <= width else f"{text[: width // 2 - 1]}…{text[-(width - width // 2) :]}"


def truncate_lines(lines: Iterable[str], limit: int, indent: str = "  ") -> list[str]:
    """Return the first `limit` lines, and ``… and N more`` if there are more."""
    lines = list(lines)
    rest = [f"{indent}… and {len(lines) - limit:,} more"] if len(lines) > limit else []
    return lines[:limit] + rest


def wrap_words(text: str, width: int | None, indent: str = "  ") -> list[str]:
    """Break a text between words into lines of at most `width` characters; ``None`` for one line."""
    if width is None:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _scale(num_bytes: int, base: int, units: Sequence[str]) -> tuple[float, str]:
    """Return the number in the first unit in which it is below `base`, or in the last one, and the unit."""
    size = float(num_bytes)
    for unit in units[:-1]:
        if size < base - 0.5:
            return size, unit
        size /= base
    return size, units[-1]


def _three_digits(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
