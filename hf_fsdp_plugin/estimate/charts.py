"""Charts as lists of shapes, which are drawn as SVG into self-contained HTML pages.

The texts of an SVG are in the page around it, so that they stay readable at any width. The parts of pages are macros of
the template charts.html.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import accumulate
from typing import Any, Final

from hf_fsdp_plugin.estimate.results import MEMORY_KINDS, MemoryKind, Moment
from hf_fsdp_plugin.text import format_count, format_memory, format_seconds

COLORS: Final[dict[MemoryKind, str]] = {
    "params": "#0072b2",
    "grads": "#e69f00",
    "optimizer": "#009e73",
    "activations": "#cc79a7",
    "gathered": "#56b4e9",
    "other": "#8c8c8c",
}
"""The palette of Okabe and Ito, which color-blind readers can tell apart."""
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A polygon.

    Attributes:
        color: ``transparent`` for a polygon that only has a title.
        title: what is shown where the mouse points to the shape.
    """

    points: Sequence[Point]
    color: str
    title: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Shapes in a field from 0 to a width and a height.

    Attributes:
        ticks: texts on the axis of the width, at equal distances.
        legend: names with their colors.
        is_low: whether the picture is less high than others.
    """

    title: str
    shapes: Sequence[Shape]
    width: float
    height: float
    ticks: Sequence[str] = ()
    legend: Mapping[str, str]
    is_low: bool = False

    def scaled(self, point: Point) -> str:
        """Return a point in the coordinates of an SVG of 1000 × 200, from the top."""
        return f"{1000 * point[0] / self.width:.2f},{200 * (1 - point[1] / self.height):.2f}"


def rectangle(x: float, y: float, width: float, height: float, color: str, title: str = "") -> Shape:
    points = ((x, y), (x + width, y), (x + width, y + height), (x, y + height))
    return Shape(points=points, color=color, title=title)


def memory_chart(moments: Sequence[Moment], legend: Mapping[str, str]) -> Chart:
    """Return stacked areas of the kinds of memory over the moments of a step. There must be at least two moments."""
    top = float(max(moment.bytes for moment in moments) or 1)
    stacked = [[0, *accumulate(moment.bytes_by_kind.get(kind, 0) for kind in MEMORY_KINDS)] for moment in moments]
    shapes = []
    for at, kind in enumerate(MEMORY_KINDS):
        lower = [(float(x), float(sums[at])) for x, sums in enumerate(stacked)]
        upper = [(float(x), float(sums[at + 1])) for x, sums in enumerate(stacked)]
        shapes.append(Shape(points=[*upper, *reversed(lower)], color=COLORS[kind]))
    width = len(moments) - 1
    part = width / len(moments)
    for at, moment in enumerate(moments):
        title = f"{moment.where}: {format_memory(moment.bytes)}"
        shapes.append(rectangle(part * at, 0, part, top, "transparent", title))
    ticks = (moments[0].where, moments[-1].where)
    return Chart(title="Memory during a step", shapes=shapes, width=width, height=top, ticks=ticks, legend=legend)


@cache
def macros() -> Any:
    """Return the macros of the template, which return HTML and escape all texts."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "count": format_count, "seconds": format_seconds,
        "size": format_memory,
    }  # fmt: skip
    text = files("hf_fsdp_plugin.estimate").joinpath("charts.html").read_text(encoding="utf-8")
    return environment.from_string(text, {"COLORS": COLORS}).module


def html_document(title: str, body: str) -> str:
    """Return a page with a body of HTML: light and dark, without scripts, and with no address of another file."""
    return str(macros().document(title, body))
