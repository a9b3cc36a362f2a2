"""Charts as inline SVG. Their texts are in the page around them, so that they stay readable at any width."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from hf_fsdp_plugin.estimate.pictures.data import COLORS
from hf_fsdp_plugin.estimate.results import MEMORY_KINDS, Moment
from hf_fsdp_plugin.estimate.schedule import Span
from hf_fsdp_plugin.text import format_bytes

_WIDTH, _HEIGHT = 1000.0, 200.0
_LANES: Final = {"compute": (0, COLORS["optimizer"]), "communication": (1, COLORS["params"])}
_ALL_REDUCE: Final = (2, COLORS["grads"])
_MOST_SPANS: Final = 1500


def memory_areas(moments: Sequence[Moment], *, over_time: bool = False) -> str:
    """Return stacked areas of the kinds of memory over the moments of a step.

    Args:
        moments: at least two.
        over_time: place the moments by their seconds, instead of at equal distances.
    """
    top = max(moment.bytes for moment in moments) or 1
    places = [(moment.seconds or 0.0) if over_time else index for index, moment in enumerate(moments)]
    length = (places[-1] - places[0]) or 1
    xs = [_WIDTH * (place - places[0]) / length for place in places]
    base = [0.0] * len(moments)
    paths = []
    for kind in MEMORY_KINDS:
        upper = [low + moment.bytes_by_kind.get(kind, 0) for low, moment in zip(base, moments, strict=True)]
        outline = [*_points(xs, upper, top), *reversed(_points(xs, base, top))]
        paths.append(f'<path fill="{COLORS[kind]}" d="M{" L".join(outline)} Z"/>')
        base = upper
    step = _WIDTH / len(moments)
    lefts = xs if over_time else [index * step for index in range(len(moments))]
    rights = [*lefts[1:], _WIDTH]
    titles = "".join(
        f'<rect x="{left:.2f}" y="0" width="{right - left:.2f}" height="{_HEIGHT:.0f}" fill="transparent">'
        f"<title>{escape(moment.where)}: {format_bytes(moment.bytes, binary=True)}</title></rect>"
        for left, right, moment in zip(lefts, rights, moments, strict=True)
    )
    return svg("".join(paths) + titles, "Memory during a step")


def _points(xs: Sequence[float], values: Sequence[float], top: float) -> list[str]:
    return [f"{x:.2f} {_HEIGHT * (1 - value / top):.2f}" for x, value in zip(xs, values, strict=True)]


def stream_lanes(spans: Sequence[Span]) -> str:
    """Return one lane per stream with a rectangle per span; beyond a limit, only the longest."""
    end = max(span.end for span in spans) or 1.0
    shown = sorted(spans, key=lambda span: span.start - span.end)[:_MOST_SPANS]
    rectangles = []
    for span in sorted(shown, key=lambda span: span.start):
        lane, color = _LANES.get(span.stream, _ALL_REDUCE)
        x, width = _WIDTH * span.start / end, max(0.4, _WIDTH * (span.end - span.start) / end)
        opacity = "" if "backward" not in span.what else ' fill-opacity="0.6"'
        rectangles.append(
            f'<rect x="{x:.2f}" y="{lane * 66 + 4}" width="{width:.2f}" height="58" fill="{color}"{opacity}>'
            f"<title>{escape(span.what)}: {(span.end - span.start) * 1000:.2f} ms</title></rect>"
        )
    return svg("".join(rectangles), "Streams of a step", "lanes")


def scaling_lines(efficiencies: Sequence[float]) -> str:
    """Return a line of the efficiency, from 0 at the bottom to 1.1 at the top, with a rule at 1."""
    count = max(1, len(efficiencies) - 1)
    points = [
        (_WIDTH * index / count, _HEIGHT * (1 - min(value, 1.1) / 1.1)) for index, value in enumerate(efficiencies)
    ]
    one = _HEIGHT * (1 - 1 / 1.1)
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    rule = f'<line x1="0" x2="{_WIDTH:.0f}" y1="{one:.1f}" y2="{one:.1f}" stroke="gray" stroke-dasharray="8 8"/>'
    color = COLORS["params"]
    area = (
        f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="3" vector-effect="non-scaling-stroke"/>'
    )
    return svg(rule + area, "Efficiency over the number of ranks")


def svg(content: str, label: str, css_class: str = "") -> str:
    """Return an image that is as wide as the page. Its content has the coordinates of 1000 × 200."""
    box = f'viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" preserveAspectRatio="none" role="img" aria-label="{label}"'
    return f'<svg class="{css_class}" {box} xmlns="http://www.w3.org/2000/svg">{content}</svg>'
