"""Text of a plan: its settings by section, and a table of units in which equal layers share a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, product
from typing import Any

from hf_fsdp_plugin.plan.units import UnitPlan
from hf_fsdp_plugin.text import fit_table, format_count, truncate_lines

MAX_NAMES = 12


def settings_text(settings: Iterable[tuple[str, Any]], width: int | None = None) -> list[str]:
    """Return one line per section: ``prefetch    backward pre · forward no · limit_all_gathers yes``.

    Args:
        settings: canonical names and values, grouped by section.
        width: maximum number of columns. Longer sections have several lines.
    """
    split = [(*name.split(".", 1), value) for name, value in settings]
    indent = max(len(section) for section, _, _ in split) + 4
    lines: list[str] = []
    for section, group in groupby(split, key=lambda setting: setting[0]):
        line = f"  {section}".ljust(indent)
        for number, item in enumerate(f"{name} {_value_text(value)}" for _, name, value in group):
            if number and width is not None and len(line) + len(item) + 3 > width:
                lines.append(line)
                line = " " * indent + item
            else:
                line += f" · {item}" if number else item
        lines.append(line)
    return lines


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        value = ", ".join(map(str, value))
    return str(value) if value != "" else "–"


def names_text(title: str, names: Sequence[str]) -> list[str]:
    """Return a blank line, a title and the first names as lines; an empty list if there are no names."""
    return ["", title, *truncate_lines((f"  {name}" for name in names), MAX_NAMES)] if names else []


def units_text(units: Iterable[UnitPlan], width: int | None = None) -> str:
    """Return a table of units. Units that differ only in the numbers in their names share a row."""
    rows = [("unit", "class", "parameters", "dtype", "after forward")]
    for same in _groups(units):
        first = same[0]
        times = f" ×{len(same)}" if len(same) > 1 else ""
        rows.append(
            (
                _common_name([unit.name for unit in same]) or "(root)",
                first.class_name + times,
                format_count(first.num_params) + (" each" if times else ""),
                " + ".join(sorted(first.dtypes)) or "–",
                "freed" if first.reshard_after_forward else "kept",
            )
        )
    return fit_table(rows, width)


def _groups(units: Iterable[UnitPlan]) -> list[list[UnitPlan]]:
    """Group units that differ only in the numbers in their names, in the order of each group's first unit."""
    groups: dict[tuple[object, ...], list[UnitPlan]] = {}
    for unit in units:
        template = tuple("#" if part.isdigit() else part for part in unit.name.split("."))
        dtypes = tuple(sorted(unit.dtypes))
        key = (template, unit.class_name, unit.num_params, dtypes, len(unit.frozen), unit.reshard_after_forward)
        groups.setdefault(key, []).append(unit)
    return list(groups.values())


def _common_name(names: Sequence[str]) -> str:
    """Return ``model.layers.0–29`` for names that differ only in their numbers."""
    columns = [list(dict.fromkeys(parts)) for parts in zip(*(name.split(".") for name in names), strict=True)]
    if len(list(product(*columns))) != len(names):  # some combinations are missing, so ranges would be wrong
        return f"{names[0]} … {names[-1]}"
    return ".".join(_ranges(values) if len(values) > 1 else values[0] for values in columns)


def _ranges(values: Iterable[str]) -> str:
    """Return ``0–3,7`` for 0, 1, 2, 3, 7."""
    ranges: list[list[int]] = []
    for number in sorted(map(int, values)):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ",".join(f"{span[0]}–{span[-1]}" if len(span) > 1 else str(span[0]) for span in ranges)
