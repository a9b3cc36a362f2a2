"""One self-contained HTML page with the pictures of a plan: no scripts, no network, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from hf_fsdp_plugin.estimate.pictures.charts import memory_areas, scaling_lines, stream_lanes
from hf_fsdp_plugin.estimate.pictures.data import COLORS, KIND_NAMES, PictureData, StrategyMemory
from hf_fsdp_plugin.estimate.pictures.document import html_document
from hf_fsdp_plugin.estimate.pictures.unit_tree import UnitNode
from hf_fsdp_plugin.estimate.results import MEMORY_KINDS
from hf_fsdp_plugin.text import format_bytes, format_count, format_seconds, plural


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
    return html_document(title, body)


def _verdict(data: PictureData) -> str:
    peak = data.memory.peak
    need = f"Each rank needs {_size(data.memory.needed_bytes)}, in the {peak.where}."
    if data.gpu_memory is None:
        return need
    fits = "It fits" if data.memory.needed_bytes <= data.gpu_memory else "It does not fit"
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
    low, high = data.time.low_seconds, data.time.high_seconds
    interval = f" ({format_seconds(low)} to {format_seconds(high)})" if low is not None and high is not None else ""
    yield (
        f"<p>{format_seconds(data.time.step_seconds)} per step{interval}, of which "
        f"{format_seconds(data.time.exposed_seconds)} are "
        f"communication that is not overlapped. {data.time.tokens_per_second:,.0f} tokens/s.</p>"
    )
    yield '<p class="dim">From top to bottom: computation, all-gathers and reduce-scatters, all-reduces.</p>'
    yield stream_lanes(data.spans)
    yield f'<p class="axis"><span>0</span><span>{format_seconds(end)}</span></p>'
    yield f'<p class="dim">{escape(data.time.evidence)}; {escape(data.time.machine)}</p></section>'


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
    num_units = times * node.num_units
    count = f" × {num_units}" if num_units > 1 else ""
    own = num_units * node.num_params
    size = f"{format_count(node.num_params)}{count}"
    fill = f'<i style="width:{100 * own / whole:.3f}%;background:{COLORS["params"]}"></i>'
    name = escape(node.name or "(root)")
    label = f"<p><span><strong>{name}</strong> {escape(node.class_name)}</span><span>{size}</span></p>"
    inner = "".join(_unit(child, whole, num_units) for child in node.children)
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
            f"{row.world_size:,}", format_seconds(each.step_seconds), format_seconds(each.exposed_seconds),
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
