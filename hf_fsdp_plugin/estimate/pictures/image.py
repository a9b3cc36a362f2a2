"""A PNG with the pictures of a plan, drawn by matplotlib (the extra ``plots``)."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from typing import Any

from hf_fsdp_plugin.estimate.pictures.data import COLORS, KIND_NAMES, PictureData
from hf_fsdp_plugin.estimate.pictures.figure import new_figure
from hf_fsdp_plugin.estimate.results import MEMORY_KINDS
from hf_fsdp_plugin.text import format_count, shorten

_GIB = 2**30


def image(data: PictureData) -> bytes:
    """Return the PNG.

    Raises:
        SpecError: matplotlib is not installed (FSDP-E834).
    """
    has_time = bool(data.spans)
    figure = new_figure(f"{data.title}\n{data.subtitle}", 13, 13 if has_time else 9)
    axes = figure.subplots(3 if has_time else 2, 2, squeeze=False)
    _strategies(axes[0][0], data)
    _units(axes[0][1], data)
    _timeline(axes[1][0], data)
    _scaling(axes[1][1], data)
    if has_time:
        grid = axes[2][0].get_gridspec()
        for axis in axes[2]:
            axis.remove()
        _streams(figure.add_subplot(grid[2, :]), data)
    content = BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def _strategies(axis: Any, data: PictureData) -> None:
    names = [f"{row.name}{' (planned)' if row.is_planned else ''}" for row in data.strategies]
    left = [0.0] * len(names)
    for kind in MEMORY_KINDS:
        sizes = [row.memory.peak.bytes_by_kind.get(kind, 0) / _GIB for row in data.strategies]
        axis.barh(names, sizes, left=left, color=COLORS[kind], label=KIND_NAMES[kind])
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    if data.gpu_memory is not None:
        axis.axvline(data.gpu_memory / _GIB, color="#c1121f", label="device memory")
    axis.invert_yaxis()
    axis.set(title="Memory per rank by strategy", xlabel="GiB")
    axis.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=4, frameon=False)


def _units(axis: Any, data: PictureData) -> None:
    root = replace(data.units, children=(), name="(root)")
    rows = sorted((root, *data.units.children), key=lambda row: -row.total)[:12]
    names = [shorten(row.name, 44) for row in rows]
    axis.barh(names, [row.total for row in rows], color=COLORS["params"])
    for index, row in enumerate(rows):
        each = format_count(row.total // row.num_units)
        text = f" {each}" + (f" × {row.num_units}" if row.num_units > 1 else "")
        axis.text(row.total, index, text, va="center", fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.25)
    axis.set(title="Units by number of parameters")
    axis.xaxis.set_major_formatter(lambda value, _: format_count(int(value)))


def _timeline(axis: Any, data: PictureData) -> None:
    moments = data.memory.timeline
    series = [[moment.bytes_by_kind.get(kind, 0) / _GIB for moment in moments] for kind in MEMORY_KINDS]
    if moments:
        axis.stackplot(range(len(moments)), *series, colors=[COLORS[kind] for kind in MEMORY_KINDS])
    if data.gpu_memory is not None:
        axis.axhline(data.gpu_memory / _GIB, color="#c1121f")
    axis.set(title="Memory during a step", ylabel="GiB", xlabel="moments of the step")


def _scaling(axis: Any, data: PictureData) -> None:
    axis.set(title="Tokens/s per rank, relative to the first world size")
    if not data.scaling:
        axis.text(0.5, 0.5, "with --machine and --scaling", ha="center", va="center", transform=axis.transAxes)
        axis.set_axis_off()
        return
    axis.plot([row.world_size for row in data.scaling], [row.efficiency for row in data.scaling], marker="o")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{int(value):,}")
    axis.axhline(1, color="gray", linestyle="--")
    axis.set(xlabel="ranks", ylim=(0, 1.15))


def _streams(axis: Any, data: PictureData) -> None:
    lanes = {
        "compute": (2, COLORS["optimizer"]), "communication": (1, COLORS["params"]), "all_reduce": (0, COLORS["grads"])
    }  # fmt: skip
    for stream, (height, color) in lanes.items():
        bars = [(span.start, span.end - span.start) for span in data.spans if span.stream == stream]
        axis.broken_barh(bars, (height - 0.4, 0.8), facecolors=color, edgecolors="white", linewidth=0.3)
    axis.set_ylim(-0.5, 2.5)
    axis.set_yticks([2, 1, 0], ["computation", "all-gathers,\nreduce-scatters", "all-reduces"])
    step = f": {data.time.step_seconds:.3f} s" if data.time is not None else ""
    axis.set(title=f"Streams of a step{step}", xlabel="seconds")
