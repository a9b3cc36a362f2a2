"""The page of ``hf-fsdp watch --html``: a run with its figures as pictures."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from hf_fsdp_plugin.text import printable
from hf_fsdp_plugin.tools.pages import HEIGHT, WIDTH, areas, load_macros
from hf_fsdp_plugin.tools.watch import figures
from hf_fsdp_plugin.tools.watch.figures import Figure
from hf_fsdp_plugin.tools.watch.run_folder import Run

_MAX_POINTS: Final = 600
_MAX_FIGURES: Final = 60
_MAX_ROWS: Final = 50
_MARGIN: Final = 6.0
"""Distance of a line from the edges of its picture."""
Point = tuple[float, float]


def run_page(run: Run) -> str:
    """Return one self-contained HTML page of a run. The template run.html draws the figures as SVG."""
    macros = load_macros("watch/run.html")
    name = printable(run.folder.resolve().name)
    moments = figures.memory_moments(run)
    moments = moments[:: 1 + len(moments) // _MAX_POINTS]
    resumed = [event["resumed"] for event in run.events.restarts if event["resumed"] is not None]
    steps = sorted(run.events.rows)
    body = macros.run(
        name=name,
        state=run.state,
        headline=printable(figures.headline(run)),
        facts=_texts(figures.facts(run)),
        charts=[
            (figure, list(lines_of(figure, steps)), [_x(step, steps) for step in resumed])
            for figure in figures.figures_of(run)[:_MAX_FIGURES]
        ],
        steps=steps,
        moments=moments,
        areas=list(areas(moments)),
        checkpoints=[figures.CHECKPOINT_HEAD, *(_texts(figures.checkpoint_cells(row)) for row in run.checkpoints)],
        restarts=_texts(map(figures.restart_line, reversed(run.events.restarts[-_MAX_ROWS:]))),
        stragglers=_texts(map(figures.straggler_line, reversed(run.events.stragglers[-_MAX_ROWS:]))),
        report=_texts(figures.report_lines(run.report)),
        notes=_texts(figures.notes(run)),
        written=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    )
    return str(macros.page(name, str(body)))


def _texts(lines: Iterable[str]) -> list[str]:
    return [printable(line) for line in lines if line]


def _x(step: int, steps: Sequence[int]) -> float:
    """Return the place of a step in a picture of all steps."""
    first, last = steps[0], steps[-1]
    return WIDTH * min(1.0, max(0.0, (step - first) / (last - first))) if last > first else WIDTH / 2


def lines_of(figure: Figure, steps: Sequence[int]) -> list[list[Point]]:
    """Return the lines of a figure, in units of the picture. They are interrupted where a value is not finite.

    Of many values, each point is the mean of a part of them.

    Args:
        steps: all logged steps, which all pictures have in common.
    """
    low, high = min(figure.finite, default=0.0), max(figure.finite, default=0.0)
    size = 1 + len(figure.series) // _MAX_POINTS
    parts = [figure.series[start : start + size] for start in range(0, len(figure.series), size)]
    points: list[Point | None] = []
    for part in parts:
        mean = sum(value for _, value in part) / len(part)
        share = (mean - low) / (high - low) if high > low else 0.5
        y = HEIGHT - _MARGIN - share * (HEIGHT - 2 * _MARGIN)
        points.append((_x(part[-1][0], steps), y) if math.isfinite(y) else None)
    gaps = [-1, *(number for number, point in enumerate(points) if point is None), len(points)]
    lines = ([point for point in points[start + 1 : stop] if point] for start, stop in pairwise(gaps))
    return list(filter(None, lines))
