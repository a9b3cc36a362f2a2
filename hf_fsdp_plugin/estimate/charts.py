"""Charts as lists of shapes, which are drawn as SVG into self-contained HTML pages, and as PNG by matplotlib.

The texts of an SVG are in the page around it, so that they stay readable at any width. The parts of pages are macros of
the template charts.html.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from io import BytesIO
from itertools import accumulate
from typing import Any, Final

from hf_fsdp_plugin.estimate.results import MEMORY_KINDS, MemoryKind, Moment
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_bytes, format_count, format_seconds

COLORS: Final[dict[MemoryKind, str]] = {
    "params": "#0072b2",
    "grads": "#e69f00",
    "optimizer": "#009e73",
    "activations": "#cc79a7",
    "gathered": "#56b4e9",
    "other": "#8c8c8c",
}
"""The palette of Okabe and Ito, which color-blind readers can tell apart."""
_PALETTE: Final = tuple(COLORS.values())
_DASHES: Final = ("", "14 8", "4 6", "18 6 4 6")
"""Patterns of the lines from the second repetition of the colors on."""
_HEADROOM: Final = 1.08
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A polygon, or a line through points.

    Attributes:
        color: ``transparent`` for a polygon that only has a title.
        title: what is shown where the mouse points to the shape.
        dashes: lengths of dashes and gaps of a line.
    """

    points: Sequence[Point]
    color: str
    title: str = ""
    is_line: bool = False
    dashes: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Shapes in a field from 0 to a width and a height.

    Attributes:
        unit: of the height.
        ticks: places and texts on the axis of the width.
        rows: places and texts on the axis of the height, instead of numbers.
        legend: names with their colors.
    """

    title: str
    shapes: tuple[Shape, ...]
    width: float
    height: float
    unit: str = ""
    ticks: tuple[tuple[float, str], ...] = ()
    rows: tuple[tuple[float, str], ...] = ()
    legend: Mapping[str, str]

    def scaled(self, point: Point) -> str:
        """Return a point in the coordinates of an SVG of 1000 × 200, from the top."""
        return f"{1000 * point[0] / self.width:.2f},{200 * (1 - point[1] / self.height):.2f}"


def rectangle(x: float, y: float, width: float, height: float, color: str, title: str = "") -> Shape:
    points = ((x, y), (x + width, y), (x + width, y + height), (x, y + height))
    return Shape(points=points, color=color, title=title)


def memory_chart(moments: Sequence[Moment], *, over_time: bool = False) -> Chart:
    """Return stacked areas of the kinds of memory over the moments of a step.

    Args:
        moments: at least two.
        over_time: place the moments by their seconds, instead of at equal distances.
    """
    top = float(max(moment.bytes for moment in moments) or 1)
    places = [(moment.seconds or 0.0) if over_time else float(at) for at, moment in enumerate(moments)]
    xs = [place - places[0] for place in places]
    width = xs[-1] or 1.0
    stacked = [[0, *accumulate(moment.bytes_by_kind.get(kind, 0) for kind in MEMORY_KINDS)] for moment in moments]
    shapes = []
    for at, kind in enumerate(MEMORY_KINDS):
        lower = [(x, float(sums[at])) for x, sums in zip(xs, stacked, strict=True)]
        upper = [(x, float(sums[at + 1])) for x, sums in zip(xs, stacked, strict=True)]
        shapes.append(Shape(points=[*upper, *reversed(lower)], color=COLORS[kind]))
    lefts = xs if over_time else [width * at / len(moments) for at in range(len(moments))]
    for left, right, moment in zip(lefts, [*lefts[1:], width], moments, strict=True):
        title = f"{moment.where}: {format_bytes(moment.bytes, binary=True)}"
        shapes.append(rectangle(left, 0, right - left, top, "transparent", title))
    return Chart(title="Memory during a step", shapes=tuple(shapes), width=width, height=top, unit="bytes", legend={})


def rank_chart(*, title: str, lines: Mapping[str, Mapping[int, float]], unit: str, rule: float | None = None) -> Chart:
    """Return lines over numbers of ranks.

    Args:
        lines: name of a line -> value by number of ranks.
        rule: a value that is marked by a horizontal line.
    """
    places = {world: float(at) for at, world in enumerate(sorted({world for line in lines.values() for world in line}))}
    height = max([*(value for line in lines.values() for value in line.values()), rule or 0.0]) * _HEADROOM or 1.0
    width, shapes, legend = max(1.0, len(places) - 1.0), [], {}
    if rule is not None:
        shapes.append(Shape(points=((0, rule), (width, rule)), color="gray", is_line=True, dashes="8 8"))
    for index, (name, line) in enumerate(lines.items()):
        color, dashes = _PALETTE[index % len(_PALETTE)], _DASHES[index // len(_PALETTE) % len(_DASHES)]
        legend[f"{name} (dashed)" if dashes else name] = color
        points = [(places[world], line[world]) for world in sorted(line)]
        shapes.append(Shape(points=points, color=color, title=name, is_line=True, dashes=dashes))
        for world, (x, y) in zip(sorted(line), points, strict=True):
            text = f"{name}, {world:,} ranks: {_number(line[world])} {unit}"
            shapes.append(rectangle(x - width / 200, y - height / 50, width / 100, height / 25, color, text))
    ticks = tuple((x, f"{world:,}") for world, x in places.items())
    return Chart(title=title, shapes=tuple(shapes), width=width, height=height, unit=unit, ticks=ticks, legend=legend)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@cache
def macros() -> Any:
    """Return the macros of the template, which return HTML and escape all texts."""
    from jinja2 import Environment, StrictUndefined

    filters = {
        "count": format_count, "number": _number, "seconds": format_seconds,
        "size": lambda size: format_bytes(size, binary=True),
    }  # fmt: skip
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(filters)
    text = files("hf_fsdp_plugin.estimate").joinpath("charts.html").read_text(encoding="utf-8")
    return environment.from_string(text, {"COLORS": COLORS}).module


def html_document(title: str, body: str, *, style: str = "", script: str = "") -> str:
    """Return a page: light and dark, and with no address of another file.

    Args:
        body: HTML.
        style: CSS, in addition to that of all pages.
        script: JavaScript that runs after the body is parsed. The page is complete without it.
    """
    return str(macros().document(title, body, style, script))


def memory_areas(moments: Sequence[Moment], *, over_time: bool = False) -> str:
    """Return :func:`memory_chart` as SVG."""
    return str(macros().svg(memory_chart(moments, over_time=over_time)))


def chart_html(chart: Chart) -> str:
    """Return a section with a chart over numbers of ranks, its legend and its axis."""
    return str(macros().chart(chart))


def table_html(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a section with a table; the first row is the head, and the first column is aligned to the left."""
    return str(macros().section(title, macros().table(rows)))


def charts_image(title: str, charts: Iterable[Sequence[Chart]], *, width: float = 6.5, height: float = 4.5) -> bytes:
    """Return a PNG with rows of charts.

    Args:
        width, height: of a chart, in inches; the charts of a row share the width of the image.

    Raises:
        SpecError: matplotlib is not installed (FSDP-E834).
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        message = "--png needs matplotlib, which is not installed."
        fix = 'Install it (pip install "hf_fsdp_plugin[plots]"), or use --html.'
        raise SpecError([Problem(code="FSDP-E834", message=message, fix=fix)]) from error
    rows = [row for row in charts if row]
    figure = Figure(figsize=(width * max(map(len, rows)), height * len(rows)), layout="constrained")
    figure.suptitle(title, fontsize=12)
    for part, row in zip(figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        for axis, chart in zip(part.subplots(1, len(row), squeeze=False)[0], row, strict=True):
            _draw(axis, chart)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def _draw(axis: Any, chart: Chart) -> None:
    from matplotlib.ticker import FuncFormatter

    for shape in chart.shapes:
        xs, ys = zip(*shape.points, strict=True)
        if shape.is_line:
            axis.plot(xs, ys, "--" if shape.dashes else "-", color=shape.color)
        elif shape.color != "transparent":
            axis.fill(xs, ys, color=shape.color, linewidth=0)
    for name, color in chart.legend.items():
        axis.fill([], [], color=color, label=name)
    axis.set(title=chart.title, xlim=(0, chart.width), ylim=(0, chart.height))
    axis.set_xticks([place for place, _ in chart.ticks], [text for _, text in chart.ticks])
    if chart.rows:
        axis.set_yticks([place for place, _ in chart.rows], [text for _, text in chart.rows], fontsize=8)
    elif chart.unit == "bytes":
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(int(value), binary=True)))
    else:
        axis.set_ylabel(chart.unit)
    if chart.legend:
        axis.legend(fontsize=8)
