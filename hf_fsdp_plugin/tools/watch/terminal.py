"""A run as text for a terminal."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Final

from hf_fsdp_plugin.cli.output import Color, colored
from hf_fsdp_plugin.text import format_memory, format_table, printable, shorten, truncate_lines, wrap_words
from hf_fsdp_plugin.tools.plan.estimate.types import KIND_NAMES
from hf_fsdp_plugin.tools.watch import figures
from hf_fsdp_plugin.tools.watch.figures import Figure
from hf_fsdp_plugin.tools.watch.run_folder import Run, RunState

_COLORS: Final[Mapping[RunState, Color]] = {
    "running": "green", "finished": "green", "failed": "red", "silent": "yellow", "unknown": "cyan",
}  # fmt: skip
_MAX_FIGURES: Final = 24
_MAX_LINES: Final = 5
_CHART: Final = 40
_LEAST_CHART: Final = 12
_NAME: Final = 26


def run_text(run: Run, width: int | None) -> str:
    """Return what is known of a run: lines of at most `width` columns.

    Args:
        width: columns of the terminal; ``None`` for 100.
    """
    width = width or 100
    parts = [
        "\n".join([_title(run, width), *_wrapped(filter(None, figures.facts(run)), width)]),
        _figures(run, width),
        _memory(run, width),
        _checkpoints(run, width),
        _section("restarts", map(figures.restart_line, reversed(run.events.restarts)), width),
        _section("slow ranks", map(figures.straggler_line, reversed(run.events.stragglers)), width),
        _section("report", figures.report_lines(run.report), width, limit=10),
        "\n".join(_wrapped(figures.notes(run), width)),
    ]
    return "\n\n".join(filter(None, parts))


def _title(run: Run, width: int) -> str:
    state = printable(figures.headline(run))
    name = shorten(printable(str(run.folder)), max(12, width - len(state) - 2))
    return f"{colored(name, 'bold')}  {colored(shorten(state, max(12, width - len(name) - 2)), _COLORS[run.state])}"


def _wrapped(lines: Iterable[str], width: int) -> list[str]:
    return [part[:width] for line in lines for part in wrap_words(printable(line), width)]


def _section(title: str, lines: Iterable[str], width: int, limit: int = _MAX_LINES) -> str:
    wrapped = truncate_lines((f"  {line}" for line in _wrapped(lines, width - 2)), limit)
    return "\n".join([colored(title, "bold"), *wrapped]) if wrapped else ""


def _figures(run: Run, width: int) -> str:
    """Return a table of the figures, with their course if there is room for it."""
    shown = figures.figures_of(run)
    if not shown:
        return ""
    steps = range(min(run.events.rows), max(run.events.rows) + 1)
    rows = [("figure", "last", "lowest", "highest")]
    rows += [(shorten(each.title, _NAME), each.last, each.lowest, each.highest) for each in shown[:_MAX_FIGURES]]
    table = format_table(rows, right={1, 2, 3}).split("\n")
    if max(map(len, table)) > width - _LEAST_CHART - 2:
        table = format_table([row[:2] for row in rows], right={1}).split("\n")
    own = max(map(len, table))
    room = min(_CHART, width - own - 2)
    charts = (
        ["over time", *(_sparkline(each, steps, room) for each in shown)] if room >= _LEAST_CHART else [""] * len(table)
    )
    head, *lines = [f"{line:<{own}}  {chart}".rstrip()[:width] for line, chart in zip(table, charts, strict=False)]
    rest = [f"… and {len(shown) - _MAX_FIGURES} more figures"] if len(shown) > _MAX_FIGURES else []
    return "\n".join([colored(head, "bold"), *lines, *rest])


def _blocks() -> str:
    """Return the characters of a bar by its height: ASCII if the terminal may not have others."""
    has_others = os.environ.get("TERM") != "dumb" and "utf" in (sys.stdout.encoding or "utf").lower()
    return "▁▂▃▄▅▆▇█" if has_others else "_.-~=*#@"


def _sparkline(figure: Figure, steps: range, width: int) -> str:
    """Return the course of a figure: for each part of the steps, the mean of its values, or the one before.

    ``!`` is a mean that is infinite or not a number.

    Args:
        steps: all steps of the run, which the charts have in common.
    """
    blocks, low, high = _blocks(), min(figure.finite, default=0.0), max(figure.finite, default=0.0)
    if len(steps) < 2:
        return ""
    parts: dict[int, list[float]] = {}
    for step, value in figure.series:
        parts.setdefault((step - steps[0]) * (width - 1) // (len(steps) - 1), []).append(value)
    shown = ""
    for index in range(max(parts) + 1):
        if index in parts:
            mean = sum(parts[index]) / len(parts[index])
            share = (mean - low) / (high - low) if high > low else 0.5
            block = blocks[min(len(blocks) - 1, int(share * len(blocks)))] if math.isfinite(mean) else "!"
        shown += block if index >= min(parts) else " "
    return shown


def _memory(run: Run, width: int) -> str:
    """Return the memory by kind at the last logged step, as bars."""
    moments = figures.memory_moments(run)
    if not moments or not moments[-1].bytes:
        return ""
    last, full = moments[-1], _blocks()[-1]
    room = max(4, min(_CHART, width - 42))
    rows = [
        (KIND_NAMES[kind], format_memory(size), full * max(1, round(room * size / last.bytes)))
        for kind, size in last.bytes_by_kind.items()
        if size
    ]
    head = f"memory by kind at {last.where}: {format_memory(last.bytes)}"
    return "\n".join([colored(head, "bold"), *(line[:width] for line in format_table(rows, right={1}).split("\n"))])


def _checkpoints(run: Run, width: int) -> str:
    if not run.checkpoints:
        return ""
    rows = [figures.CHECKPOINT_HEAD, *map(figures.checkpoint_cells, run.checkpoints[:_MAX_LINES])]
    head, *lines = format_table(rows, width=width).split("\n")
    return "\n".join([colored(head, "bold"), *lines])
