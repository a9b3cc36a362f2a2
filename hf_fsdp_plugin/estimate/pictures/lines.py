"""Lines over the number of ranks: as HTML with inline SVG, and as a PNG by matplotlib (the extra ``plots``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from typing import Any, Final

from hf_fsdp_plugin.estimate.pictures.charts import svg
from hf_fsdp_plugin.estimate.pictures.data import COLORS
from hf_fsdp_plugin.estimate.pictures.figure import new_figure

_WIDTH, _HEIGHT, _MARGIN = 1000.0, 200.0, 12.0
_PALETTE: Final = tuple(COLORS.values())
_DASHES: Final = ("", "14 8", "4 6", "18 6 4 6")
"""Patterns of the lines from the second repetition of the colors on."""
_HEADROOM: Final = 1.08


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Several lines over the same numbers of ranks.

    Attributes:
        lines: name of a line -> value by number of ranks.
        unit: what follows the largest value in the text above, such as ``tokens/s``.
        rule: a value that is marked by a horizontal line.
    """

    title: str
    lines: Mapping[str, Mapping[int, float]]
    unit: str
    rule: float | None = None

    @property
    def worlds(self) -> list[int]:
        return sorted({world for points in self.lines.values() for world in points})

    @property
    def top(self) -> float:
        values = [value for points in self.lines.values() for value in points.values()]
        return max([*values, self.rule or 0.0]) * _HEADROOM or 1.0


def chart_html(chart: Chart) -> Iterator[str]:
    """Yield a section with the chart, its legend and its axis."""
    worlds = chart.worlds
    yield f'<section><h2>{escape(chart.title)}</h2><div class="legend">'
    for index, name in enumerate(chart.lines):
        color, dashes = _look(index)
        shown = f"{escape(name)}{' (dashed)' if dashes else ''}"
        yield f'<span><i style="background:{color}"></i>{shown}</span>'
    yield f'</div><p class="dim">Top of the picture: {_number(chart.top)} {escape(chart.unit)}</p>'
    yield svg("".join(_svg_lines(chart)), f"{chart.title} over the number of ranks")
    labels = "".join(f"<span>{world:,}</span>" for world in worlds)
    yield f'<p class="axis">{labels}</p><p class="dim">ranks</p></section>'


def _svg_lines(chart: Chart) -> Iterator[str]:
    worlds = chart.worlds
    step = (_WIDTH - 2 * _MARGIN) / max(1, len(worlds) - 1)
    xs = {world: _MARGIN + step * index for index, world in enumerate(worlds)}

    def y(value: float) -> float:
        return _HEIGHT * (1 - value / chart.top)

    if chart.rule is not None:
        at = f'y1="{y(chart.rule):.1f}" y2="{y(chart.rule):.1f}"'
        yield f'<line x1="0" x2="{_WIDTH:.0f}" {at} stroke="gray" stroke-dasharray="8 8"/>'
    for index, (name, points) in enumerate(chart.lines.items()):
        color, dashes = _look(index)
        places = [(xs[world], y(points[world])) for world in worlds if world in points]
        path = " ".join(f"{x:.1f},{height:.1f}" for x, height in places)
        style = f'fill="none" stroke="{color}" stroke-width="3" vector-effect="non-scaling-stroke"'
        yield f'<polyline points="{path}" {style} stroke-dasharray="{dashes}"><title>{escape(name)}</title></polyline>'
        for world, (x, height) in zip((w for w in worlds if w in points), places, strict=True):
            title = f"<title>{escape(name)}, {world:,} ranks: {_number(points[world])} {escape(chart.unit)}</title>"
            box = f'x="{x - 4:.1f}" y="{height - 4:.1f}" width="8" height="8"'
            yield f'<rect {box} fill="{color}">{title}</rect>'


def table_html(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Return a section with a table; the first row is the head, and the first column is aligned to the left."""
    lines = []
    for index, row in enumerate(rows):
        tag = "th" if index == 0 else "td"
        cells = (f"<{tag}{' class=n' * (number > 0)}>{escape(cell)}</{tag}>" for number, cell in enumerate(row))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<section><h2>{escape(title)}</h2><div class="scroll"><table>{"".join(lines)}</table></div></section>'


def charts_image(title: str, charts: Sequence[Chart]) -> bytes:
    """Return a PNG with the charts side by side.

    Raises:
        SpecError: matplotlib is not installed (FSDP-E834).
    """
    figure = new_figure(title, 6.5 * len(charts), 5)
    for axis, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
        _draw(axis, chart)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def _draw(axis: Any, chart: Chart) -> None:
    for index, (name, points) in enumerate(chart.lines.items()):
        color, dashes = _look(index)
        worlds = sorted(points)
        style = "--" if dashes else "-"
        axis.plot(worlds, [points[world] for world in worlds], style, color=color, marker="o", label=name)
    if chart.rule is not None:
        axis.axhline(chart.rule, color="gray", linestyle=":")
    axis.set_xscale("log", base=2)
    axis.set_xticks(chart.worlds)
    axis.xaxis.set_major_formatter(lambda value, _: f"{int(value):,}")
    axis.set(title=chart.title, xlabel="ranks", ylabel=chart.unit, ylim=(0, chart.top))
    axis.legend(fontsize=8)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _look(index: int) -> tuple[str, str]:
    """Return the color of a line, and its pattern of dashes."""
    return _PALETTE[index % len(_PALETTE)], _DASHES[index // len(_PALETTE) % len(_DASHES)]
