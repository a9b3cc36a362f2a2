"""One self-contained HTML page of a profile: tables, the timeline of ranks and streams, and memory over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from hf_fsdp_plugin.estimate.pictures.charts import memory_areas
from hf_fsdp_plugin.estimate.pictures.data import COLORS, KIND_NAMES
from hf_fsdp_plugin.estimate.pictures.document import html_document
from hf_fsdp_plugin.estimate.results import MemoryKind
from hf_fsdp_plugin.observe.profile.comparison import compare
from hf_fsdp_plugin.observe.profile.marks import PHASE_NAMES, Phase
from hf_fsdp_plugin.observe.profile.page_parts import SCRIPT, STYLE
from hf_fsdp_plugin.observe.profile.rank_profile import Times
from hf_fsdp_plugin.observe.profile.run_profile import CallSums, RankTimeline, RunProfile
from hf_fsdp_plugin.observe.profile.suggestions import Suggestion
from hf_fsdp_plugin.text import format_bytes, format_seconds, plural

PHASE_COLORS: Final[dict[Phase, str]] = {
    "forward": COLORS["params"],
    "backward": COLORS["gathered"],
    "clipping": COLORS["activations"],
    "optimizer": COLORS["optimizer"],
    "data": COLORS["grads"],
    "checkpoint": "#a6761d",
    "evaluation": "#b8d4a8",
    "other": COLORS["other"],
}
_CALL_COLORS: Final = {
    "all_gather": "#d55e00",
    "reduce_scatter": "#f0e442",
    "all_reduce": "#7f3c8d",
    "broadcast": COLORS["other"],
}
_MOST_SPANS: Final = 2000
"""Collectives of one rank on the page; beyond it, only the longest."""
_MOST_UNITS: Final = 40


def page(run: RunProfile, suggestions: Sequence[Suggestion]) -> str:
    """Return the HTML. It works without scripts; with them, the timeline can be zoomed and moved."""
    plan = run.facts.get("plan", {})
    title = f"Profile of {plan.get('model', 'a run')} on {plural(run.world_size, 'rank')}"
    parts = [
        f"<h1>{escape(title)}</h1><p>{escape(_subtitle(run))}</p>",
        *_phases(run),
        *_suggestions(suggestions),
        *_timeline(run),
        *_units(run),
        *_ranks(run),
        *_memory(run),
        *_predictions(run),
    ]
    return html_document(title, "\n".join(parts), style=STYLE, script=SCRIPT)


def _subtitle(run: RunProfile) -> str:
    plan = run.facts.get("plan", {})
    text = f"{plan['backend'].upper()} {plan['strategy']}, " if plan else ""
    text += f"{run.device}, average of {plural(run.num_steps, 'step')}: {format_seconds(run.total.seconds)} per step"
    if run.overhead_seconds is not None and run.unprofiled_seconds:
        text += f", {format_seconds(run.unprofiled_seconds)} without the profiler"
    return f"{text}."


def _phases(run: RunProfile) -> Iterator[str]:
    yield '<section id="phases"><h2>Phases of a step</h2>'
    head = ("phase", "time", "computation", "communication", "share", "exposed", "idle")
    rows = [_phase_row(PHASE_NAMES[phase], times) for phase, times in run.times.items()]
    yield _table(head, [*rows, _phase_row("total", run.total)])
    yield '<p class="dim">Exposed is communication during which nothing is computed.</p></section>'


def _phase_row(name: str, times: Times) -> tuple[str, ...]:
    whole = times.compute + times.communication
    return (
        name, format_seconds(times.seconds), format_seconds(times.compute), format_seconds(times.communication),
        f"{times.communication / whole if whole else 0:.0%}", format_seconds(times.exposed), format_seconds(times.idle),
    )  # fmt: skip


def _suggestions(suggestions: Sequence[Suggestion]) -> Iterator[str]:
    yield '<section id="suggestions"><h2>Suggestions</h2>'
    items = "".join(f"<li>{escape(str(each))}</li>" for each in suggestions)
    yield f"<ul>{items}</ul></section>" if items else "<p>None.</p></section>"


def _timeline(run: RunProfile) -> Iterator[str]:
    ends = [segment.end for line in run.timelines for step in line.steps for segment in step]
    if not ends:
        return
    end = max(ends)
    yield '<section id="timeline"><h2>Timeline of the ranks</h2>' + _legend(run)
    yield (
        '<p class="dim">For each rank, phases above and collectives below. Zoom: the buttons, or Ctrl and the wheel. '
        "Move: drag, or scroll.</p>"
    )
    yield '<p class="zoom" hidden><button data-by="2">+</button> <button data-by="0.5">−</button> '
    yield '<button data-by="0">whole</button> <span class="dim" id="shown"></span></p>'
    yield f'<div id="lanes" data-end="{end:.6f}">'
    for line in run.timelines:
        yield f'<p class="dim">rank {line.rank}</p><div class="lane">{_lane(line, end)}</div>'
    yield f'</div><p class="axis"><span id="from">0</span><span id="to">{format_seconds(end)}</span></p>'
    shown = len(run.timelines)
    more = f"The first {shown} of {run.num_ranks:,} ranks. " if shown < run.num_ranks else ""
    yield f'<p class="dim">{more}The traces in the folder show all operations in ui.perfetto.dev.</p></section>'


def _legend(run: RunProfile) -> str:
    phases = {PHASE_NAMES[phase]: PHASE_COLORS[phase] for phase in run.times}
    calls = {kind.replace("_", "-"): _CALL_COLORS[kind] for kind in run.collectives}
    items = (f'<span><i style="background:{color}"></i>{name}</span>' for name, color in (phases | calls).items())
    return f'<div class="legend">{"".join(items)}</div>'


def _lane(line: RankTimeline, end: float) -> str:
    """Return an SVG: x from 0 to 1000 is the whole time."""
    scale, rectangles = 1000 / end, []
    for segment in (segment for step in line.steps for segment in step):
        text = f"{PHASE_NAMES[segment.phase]}: {format_seconds(segment.end - segment.start)}"
        rectangles.append(_rectangle(segment.start, segment.end, scale, (2, 20), PHASE_COLORS[segment.phase], text))
    calls = sorted(line.calls, key=lambda call: -call.seconds)[:_MOST_SPANS]
    for call in sorted(calls, key=lambda call: call.start):
        unit = "" if call.unit is None else f" of {call.unit or 'the root'}"
        text = f"{call.kind.replace('_', '-')}{unit}: {format_seconds(call.seconds)}, {format_bytes(call.bytes)}"
        text += f", exposed {format_seconds(call.exposed)}"
        rectangles.append(_rectangle(call.start, call.end, scale, (24, 16), _CALL_COLORS[call.kind], text))
    box = 'viewBox="0 0 1000 42" preserveAspectRatio="none" role="img"'
    return f'<svg {box} aria-label="Timeline of rank {line.rank}">{"".join(rectangles)}</svg>'


def _rectangle(start: float, end: float, scale: float, place: tuple[int, int], color: str, text: str) -> str:
    x, width = start * scale, max((end - start) * scale, 0.05)
    return (
        f'<rect x="{x:.3f}" y="{place[0]}" width="{width:.3f}" height="{place[1]}" fill="{color}">'
        f"<title>{escape(text)}</title></rect>"
    )


def _units(run: RunProfile) -> Iterator[str]:
    units = sorted(run.units, key=lambda unit: unit.order)
    if not any(unit.communication.calls for unit in units):
        return
    yield '<section id="units"><h2>Units, in the order of their all-gathers</h2>'
    head = ("unit", "forward gather", "backward gather", "reduction", "exposed", "forward", "recomputed", "bytes")
    rows = []
    for unit in units[:_MOST_UNITS]:
        sums: tuple[CallSums, ...] = (unit.gather_forward, unit.gather_backward, unit.reduce)
        rows.append(
            (
                unit.name or "(root)", *(format_seconds(each.seconds) for each in sums),
                format_seconds(unit.communication.exposed), format_seconds(unit.compute.forward),
                format_seconds(unit.compute.recomputed), format_bytes(round(unit.communication.bytes)),
            )
        )  # fmt: skip
    yield _table(head, rows)
    if len(units) > _MOST_UNITS:
        yield f'<p class="dim">and {len(units) - _MOST_UNITS:,} more, in profile.json.</p>'
    yield "</section>"


def _ranks(run: RunProfile) -> Iterator[str]:
    yield '<section id="ranks"><h2>Ranks</h2>'
    head = ("rank", "step", "computation", "others wait for it", "arrives last")
    ranks = sorted(run.ranks, key=lambda rank: -rank.late)[:_MOST_UNITS]
    rows = [
        (
            str(rank.rank), format_seconds(rank.seconds), format_seconds(rank.compute), format_seconds(rank.late),
            f"{rank.last:.0%}",
        )
        for rank in ranks
    ]  # fmt: skip
    yield _table(head, rows) + "</section>"


def _memory(run: RunProfile) -> Iterator[str]:
    if len(run.memory) < 2:
        return
    kinds: tuple[MemoryKind, ...] = ("params", "grads", "optimizer", "activations", "gathered")
    items = (f'<span><i style="background:{COLORS[kind]}"></i>{KIND_NAMES[kind]}</span>' for kind in kinds)
    peak = max(run.memory, key=lambda moment: moment.bytes)
    yield f'<section id="memory"><h2>Memory during a step</h2><div class="legend">{"".join(items)}</div>'
    yield f'<p class="dim">Top of the picture: {format_bytes(peak.bytes, binary=True)}, in {escape(peak.where)}</p>'
    yield memory_areas(run.memory, over_time=True)
    last = format_seconds(run.memory[-1].seconds or 0)
    yield f'<p class="axis"><span>0</span><span>{last}</span></p></section>'


def _predictions(run: RunProfile) -> Iterator[str]:
    rows = []
    for row in compare(run):
        values = [_figure(row.unit, value) for value in (row.predicted, row.measured)]
        rows.append((row.name, *values, f"{row.ratio:.2f}" if row.ratio is not None else "–"))
    if rows:
        yield '<section id="predicted"><h2>Predicted and measured</h2>'
        yield _table(("a step of a rank", "predicted", "measured", "ratio"), rows) + "</section>"


def _figure(unit: str, value: float | None) -> str:
    if value is None:
        return "unknown"
    if unit == "seconds":
        return format_seconds(value)
    return format_bytes(round(value), binary=True) if unit == "bytes" else f"{value:,.0f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        first, *others = (escape(cell) for cell in cells)
        return f"<tr><{tag}>{first}</{tag}>" + "".join(f'<{tag} class="n">{o}</{tag}>' for o in others) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f'<div class="scroll"><table>{line(head, "th")}{body}</table></div>'
