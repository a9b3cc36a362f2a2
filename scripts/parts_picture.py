"""Draws the packages of hf_fsdp_plugin and what each imports, read from the sources: docs/parts.svg.

A line goes from a package up to each package that imports it. Lines that follow from others are omitted: if `plan`
imports `spec`, and `spec` imports `sources`, there is none from `plan` to `sources`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Final

from scripts.size import PACKAGE, TOOLS

MODULES: Final = "top modules"
_WIDTH: Final = 640
_BOX: Final = (190, 38)
_ROW: Final = 60
_TEXT: Final = {
    "sources": "what was written",
    "spec": "typed and checked",
    "plan": "decided for a model",
    "torch_private": "private names of torch",
    "backends": "applies a plan",
    "checkpoint": "writes and reads",
    "hangs": "who waits for whom",
    "runs": "attempts, failures",
    "observe": "reads the live model",
    "metrics": "figures of a run",
    "integrations": "Accelerate, Trainer, PEFT",
    "launcher": "hf-fsdp launch",
    "cli": "the command hf-fsdp",
    TOOLS: "one folder per verb",
    MODULES: "settings, problems, devices",
}


def imports() -> dict[str, set[str]]:
    """Return the packages that each package imports, also inside functions."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        if not parts[-1].startswith("__") or len(parts) > 1:
            own = _part(parts)
            found.setdefault(own, set()).update(set(_imported(path)) - {own})
    return found


def _part(parts: tuple[str, ...]) -> str:
    return parts[0] if (PACKAGE / parts[0]).is_dir() else MODULES


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            top, *rest = name.split(".")
            if top == PACKAGE.name and rest:
                yield _part(tuple(rest))


def needed_lines(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the imports that do not follow from other imports."""
    reached: dict[str, set[str]] = {}
    for name in TopologicalSorter(graph).static_order():
        reached[name] = set(graph[name]).union(*(reached[each] for each in graph[name]))
    return {
        name: {one for one in each if not any(one in reached[other] for other in each - {one})}
        for name, each in graph.items()
    }


def draw() -> str:
    """Return the picture as SVG. Packages that import others are above them."""
    needed = needed_lines(imports())
    importers = {name: [other for other in needed if name in needed[other]] for name in needed}
    floors: dict[str, int] = {}  # from the top, each package directly below the lowest that imports it
    for name in reversed([*TopologicalSorter(needed).static_order()]):
        floors[name] = 1 + max((floors[each] for each in importers[name]), default=-1)
    width, box = _BOX
    places: dict[str, tuple[float, int]] = {}
    for floor in range(max(floors.values()) + 1):
        row = sorted(name for name in floors if floors[name] == floor)
        for number, name in enumerate(row):
            above = [places[each][0] for each in importers[name]]
            alone = sum(above) / len(above) if above else _WIDTH / 2
            center = _WIDTH * (number + 1) / (len(row) + 1) if len(row) > 1 else alone
            places[name] = (center, 12 + floor * _ROW)
    height = 24 + max(floors.values()) * _ROW + box
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        'font-family="sans-serif" font-size="11" text-anchor="middle">',
        f"<title>The packages of {PACKAGE.name}: each imports only packages below it</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for name, each in needed.items():
        for below in sorted(each):
            (x1, y1), (x2, y2) = places[name], places[below]
            y1, middle = y1 + box, (y1 + box + y2) / 2
            curve = f"M{x1:.0f} {y1}C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {y2}"
            parts.append(f'<path d="{curve}" fill="none" stroke="#888"/>')
    for name, (x, y) in places.items():
        colors = f'fill="{"#fdebd0" if name == TOOLS else "#e8f0fe"}" stroke="#555"'
        parts += [
            f'<rect x="{x - width / 2:.0f}" y="{y}" width="{width}" height="{box}" rx="5" {colors}/>',
            f'<text x="{x:.0f}" y="{y + 16}" font-weight="bold">{name}</text>',
            f'<text x="{x:.0f}" y="{y + 31}">{_TEXT[name]}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"
