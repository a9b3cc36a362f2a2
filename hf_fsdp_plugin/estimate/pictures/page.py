"""One self-contained HTML page with the pictures of a plan: no scripts, no network, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from hf_fsdp_plugin.estimate.pictures.charts import memory_areas, scaling_lines, stream_lanes
from hf_fsdp_plugin.estimate.pictures.data import COLORS, KIND_NAMES, PictureData, StrategyMemory
from hf_fsdp_plugin.estimate.pictures.unit_tree import UnitNode
from hf_fsdp_plugin.estimate.results import MEMORY_KINDS
from hf_fsdp_plugin.text import format_bytes, format_count, plural

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --dim: #5c5c5c; --paper: #ffffff; --line: #d8d8d8; --mark: #c1121f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececec; --dim: #a8a8a8; --paper: #16181b; --line: #3a3d42; --mark: #ff6b6b; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1rem; font: 16px/1.45 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; } .dim { color: var(--dim); font-size: .9rem; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .5rem 0; font-size: .9rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; border-radius: 2px; }
.row { margin: .6rem 0; } .row > p { display: flex; justify-content: space-between; gap: 1rem; }
.row > p > span:last-child { white-space: nowrap; }
.bar { position: relative; display: flex; height: 1.6rem; }
.bar, svg { background: color-mix(in srgb, var(--line) 35%, transparent); }
.bar i { display: block; height: 100%; } .bar b { position: absolute; top: -.2rem; bottom: -.2rem; width: 2px;
  background: var(--mark); }
svg { display: block; width: 100%; height: 12rem; } svg.lanes { height: 7rem; }
.axis { display: flex; justify-content: space-between; gap: 1rem; font-size: .85rem; color: var(--dim); }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
td, th { padding: .25rem .5rem; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
td.n, th.n { text-align: right; }
.tree, .tree ul { list-style: none; margin: 0; padding: 0; }
.tree ul { padding-left: clamp(.6rem, 2vw, 1.4rem); border-left: 1px solid var(--line); }
.scroll { overflow-x: auto; }
"""


def page(data: PictureData) -> str:
    """Return the HTML."""
    parts = [
        f"<h1>{escape(data.title)}</h1><p>{escape(data.subtitle)}</p><p>{escape(_verdict(data))}</p>",
        *_memory_by_strategy(data),
        *_timeline(data),
        *_streams(data),
        *_units(data),
        *_scaling(data),
        *_assumptions(data),
    ]
    return document(data.title, parts)


def document(title: str, parts: Iterable[str]) -> str:
    """Return a page with a title and the HTML of its parts."""
    body = "\n".join(parts)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def _verdict(data: PictureData) -> str:
    peak = data.memory.peak
    need = f"Each rank needs {_size(peak.bytes)}, in the {peak.where}."
    if data.gpu_memory is None:
        return need
    fits = "It fits" if peak.bytes <= data.gpu_memory else "It does not fit"
    return f"{fits} in {_size(data.gpu_memory)}. {need}"


def _legend() -> str:
    items = (f'<span><i style="background:{COLORS[kind]}"></i>{KIND_NAMES[kind]}</span>' for kind in MEMORY_KINDS)
    return f'<div class="legend">{"".join(items)}</div>'


def _memory_by_strategy(data: PictureData) -> Iterator[str]:
    largest = max([row.memory.peak.bytes for row in data.strategies] + [data.gpu_memory or 0]) or 1
    yield '<section id="strategies"><h2>Memory per rank by strategy</h2>' + _legend()
    for row in data.strategies:
        yield _bar(row, largest, data.gpu_memory)
    if data.gpu_memory is not None:
        yield f'<p class="dim">The red line is the memory of a device, {_size(data.gpu_memory)}.</p>'
    yield "</section>"


def _bar(row: StrategyMemory, largest: int, gpu_memory: int | None) -> str:
    peak = row.memory.peak
    segments = "".join(
        f'<i style="width:{100 * peak.bytes_by_kind.get(kind, 0) / largest:.3f}%;background:{COLORS[kind]}" '
        f'title="{KIND_NAMES[kind]}: {_size(peak.bytes_by_kind.get(kind, 0))}"></i>'
        for kind in MEMORY_KINDS
    )
    mark = f'<b style="left:{100 * gpu_memory / largest:.3f}%"></b>' if gpu_memory is not None else ""
    planned = " (planned)" if row.is_planned else ""
    label = f"<p><strong>{row.name}{planned}</strong><span>{_size(peak.bytes)}</span></p>"
    return f'<div class="row">{label}<div class="bar">{segments}{mark}</div></div>'


def _timeline(data: PictureData) -> Iterator[str]:
    moments = data.memory.timeline
    if len(moments) < 2:
        return
    yield '<section id="timeline"><h2>Memory during a step</h2>' + _legend()
    yield f'<p class="dim">Top of the picture: {_size(max(moment.bytes for moment in moments))}</p>'
    yield memory_areas(moments)
    first, last = escape(moments[0].where), escape(moments[-1].where)
    yield f'<p class="axis"><span>{first}</span><span>{last}</span></p></section>'


def _streams(data: PictureData) -> Iterator[str]:
    if not data.spans or data.time is None:
        return
    end = max(span.end for span in data.spans)
    yield '<section id="streams"><h2>Streams of a step</h2>'
    yield (
        f"<p>{_seconds(data.time.step_seconds)} per step (expected: {_seconds(data.time.low_seconds)} to "
        f"{_seconds(data.time.high_seconds)}), of which {_seconds(data.time.exposed_seconds)} are communication "
        f"that is not overlapped. {data.time.tokens_per_second:,.0f} tokens/s.</p>"
    )
    yield '<p class="dim">From top to bottom: computation, all-gathers and reduce-scatters, all-reduces.</p>'
    yield stream_lanes(data.spans)
    yield f'<p class="axis"><span>0</span><span>{_seconds(end)}</span></p>'
    yield f'<p class="dim">{escape(data.time.machine)}</p></section>'


def _units(data: PictureData) -> Iterator[str]:
    yield '<section id="units"><h2>Units and their parameters</h2>'
    yield '<p class="dim">A unit contains the units below it. The bars are parts of the whole model.</p>'
    yield f'<ul class="tree">{_unit(data.units, data.units.total or 1, 1)}</ul>'
    yield f'<p class="dim">{plural(_num_units(data.units), "unit")}.</p></section>'


def _unit(node: UnitNode, whole: int, times: int) -> str:
    """Return a node and those inside it.

    Args:
        whole: parameters of the model.
        times: how often the unit around the node is in the model.
    """
    count = f" × {node.num_units}" if node.num_units > 1 else ""
    own = times * node.num_units * node.num_params
    size = f"{format_count(node.num_params)}{count}"
    fill = f'<i style="width:{100 * own / whole:.3f}%;background:{COLORS["params"]}"></i>'
    name = escape(node.name or "(root)")
    label = f"<p><span><strong>{name}</strong> {escape(node.class_name)}</span><span>{size}</span></p>"
    inner = "".join(_unit(child, whole, times * node.num_units) for child in node.children)
    inner = f"<ul>{inner}</ul>" if inner else ""
    return f'<li class="row">{label}<div class="bar" style="height:.6rem">{fill}</div>{inner}</li>'


def _num_units(node: UnitNode) -> int:
    return node.num_units * (1 + sum(map(_num_units, node.children)))


def _scaling(data: PictureData) -> Iterator[str]:
    if not data.scaling:
        return
    yield '<section id="scaling"><h2>Growth with the number of ranks</h2>'
    yield '<p class="dim">Tokens/s per rank, relative to the first row, with the same micro-batch on every rank.</p>'
    yield scaling_lines([row.efficiency for row in data.scaling])
    first, last = data.scaling[0], data.scaling[-1]
    yield f'<p class="axis"><span>{first.world_size:,} ranks</span><span>{last.world_size:,} ranks</span></p>'
    yield '<div class="scroll"><table><tr><th class="n">ranks</th><th>mesh</th><th class="n">step</th>'
    yield '<th class="n">not overlapped</th><th class="n">tokens/s</th><th class="n">efficiency</th></tr>'
    for row in data.scaling:
        each = row.estimate
        cells = (
            f"{row.world_size:,}", _seconds(each.step_seconds), _seconds(each.exposed_seconds),
            f"{each.tokens_per_second:,.0f}", f"{row.efficiency:.0%}",
        )  # fmt: skip
        numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells[1:])
        yield f'<tr><td class="n">{cells[0]}</td><td>{row.mesh.replicate} × {row.mesh.shard}</td>{numbers}</tr>'
    yield "</table></div></section>"


def _assumptions(data: PictureData) -> Iterator[str]:
    if data.memory.assumptions:
        items = "".join(f"<li>{escape(text)}</li>" for text in data.memory.assumptions)
        yield f'<section id="assumptions"><h2>Assumptions</h2><ul>{items}</ul></section>'


def _size(size: int) -> str:
    return format_bytes(size, binary=True)


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
