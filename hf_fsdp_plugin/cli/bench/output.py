"""What ``hf-fsdp bench`` shows: tables of throughput, memory, efficiency and other systems, and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.integrations.bench.cases import DDP, SYSTEMS, TITLES
from hf_fsdp_plugin.text import format_bytes, format_count, format_table, plural

if TYPE_CHECKING:
    from hf_fsdp_plugin.estimate.charts import Chart

Row = Mapping[str, Any]
Table = list[list[str]]

_NOT_MEASURED: Final = {"does not fit": "does not fit", "impossible": "–", "failed": "failed", "pending": "–"}


def bench_text(tree: Mapping[str, Any]) -> str:
    """Return all tables of a result."""
    model, workload = tree["model"], tree["workload"]
    device = tree["device"]["name"] or tree["device"]["type"]
    head = (
        f"{model['class']}, {format_count(model['num_params'])} parameters, on {device}; "
        f"{workload['micro_batch']} × {workload['seq_len']:,} tokens per rank and step; medians of "
        f"{plural(workload['rounds'] * workload['blocks'], 'block')} of {plural(workload['steps'], 'step')}"
    )
    parts = [head]
    for title, table in _tables(tree):
        parts += ["", title, format_table(table, right=range(1, len(table[0])))]
    return "\n".join(parts)


def _tables(tree: Mapping[str, Any]) -> list[tuple[str, Table]]:
    """Return the tables as (title, rows); the first row is the head."""
    rows = [row for row in tree["cases"] if row["system"] == "plugin"]
    source = next((row["peak_source"] for row in rows if row["peak_source"]), "")
    found = [
        ("samples/s of all ranks, and difference from DDP", _grid(rows, _throughput)),
        ("tokens/s of all ranks, and half the interquartile range", _grid(rows, _tokens)),
        (f"peak memory of a rank ({source or 'not measured'})", _grid(rows, _peak)),
    ]
    worlds = {row["world_size"] for row in rows if row["efficiency"] is not None}
    if len(worlds) > 1:
        found.append(("efficiency: throughput of a rank over that in the smallest world", _grid(rows, _efficiency)))
    if any(row["mfu"] is not None for row in rows):
        found.append(("model FLOP/s utilization", _grid(rows, _mfu)))
    if tree["comparisons"]:
        found.append(("this package against others, on the same settings", _comparisons(tree["comparisons"])))
    return found


def _label_of(row: Row, rows: Sequence[Row]) -> str:
    """Return the column of a case: the strategy, with version and prefetch where the benchmark has several."""
    if row["strategy"] == DDP:
        return TITLES[DDP]
    sharded = [each for each in rows if each["strategy"] != DDP]
    parts = [TITLES[row["strategy"]]]
    if len({each["version"] for each in sharded}) > 1:
        parts.insert(0, f"FSDP{row['version']}")
    if len({each["prefetch"] for each in sharded}) > 1:
        parts.append(row["prefetch"])
    return " ".join(parts)


def _grid(rows: Sequence[Row], cell: Callable[[Row, Row | None], str]) -> Table:
    """Return a table with a row per number of ranks and a column per strategy."""
    columns = list(dict.fromkeys(_label_of(row, rows) for row in rows))
    worlds = list(dict.fromkeys(row["world_size"] for row in rows))
    by_place = {(row["world_size"], _label_of(row, rows)): row for row in rows}
    table = [["ranks", *columns]]
    for world in worlds:
        baseline = by_place.get((world, TITLES[DDP]))
        cells = [by_place.get((world, column)) for column in columns]
        shown = ["–" if row is None else _shown(row, baseline, cell) for row in cells]
        table.append([str(world), *shown])
    return table


def _shown(row: Row, baseline: Row | None, cell: Callable[[Row, Row | None], str]) -> str:
    return cell(row, baseline) if row["step_seconds"] is not None else _NOT_MEASURED.get(row["status"], "–")


def _throughput(row: Row, baseline: Row | None) -> str:
    own = row["samples_per_second"]
    text = f"{own:.3g}" if own < 1000 else f"{own:,.0f}"
    if baseline is None or baseline is row or baseline["samples_per_second"] is None:
        return text
    return f"{text} ({own / baseline['samples_per_second'] - 1:+.0%})"


def _tokens(row: Row, _: Row | None) -> str:
    low, high = row["step_quartiles"]
    return f"{row['tokens_per_second']:,.0f} ±{(high - low) / 2 / row['step_seconds']:.1%}"


def _peak(row: Row, _: Row | None) -> str:
    return "–" if row["peak_bytes"] is None else format_bytes(row["peak_bytes"], binary=True)


def _efficiency(row: Row, _: Row | None) -> str:
    return f"{row['efficiency']:.0%}"


def _mfu(row: Row, _: Row | None) -> str:
    return "–" if row["mfu"] is None else f"{row['mfu']:.1%}"


def _comparisons(comparisons: Sequence[Row]) -> Table:
    table = [["case", "against", "throughput", "95% interval", "in CPU time", "losses differ by"]]
    for row in comparisons:
        low, high = row["ratio_95"]
        ratio, interval = f"× {row['ratio']:.3f}", f"{low:.3f} to {high:.3f}"
        difference = f"{row['relative_loss_difference']:.1e}"
        table.append([row["case"], SYSTEMS[row["vs"]], ratio, interval, f"× {row['cpu_ratio']:.3f}", difference])
    return table


def write_pictures(tree: Mapping[str, Any], html: str | None, png: str | None) -> list[str]:
    """Write an HTML page and a PNG with the plots, and return the names of the files.

    Raises:
        SpecError: matplotlib is missing (FSDP-E834), or a file cannot be written (FSDP-E835).
    """
    from hf_fsdp_plugin.cli.plan.output import write_file
    from hf_fsdp_plugin.estimate.charts import charts_image

    if html is not None:
        write_file(Path(html), _page(tree).encode())
    if png is not None:
        write_file(Path(png), charts_image(_title(tree), [_charts_of(tree)]))
    return [name for name in (html, png) if name is not None]


def _charts_of(tree: Mapping[str, Any]) -> list[Chart]:
    """Return throughput and efficiency over the number of ranks, with a line per strategy."""
    from hf_fsdp_plugin.estimate.charts import rank_chart

    rows = [row for row in tree["cases"] if row["system"] == "plugin"]
    return [
        rank_chart(title="Throughput of all ranks", lines=_lines(rows, "tokens_per_second"), unit="tokens/s"),
        rank_chart(title="Efficiency", lines=_lines(rows, "efficiency"), unit="of the smallest world", rule=1.0),
    ]


def _lines(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, dict[int, float]]:
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        if row[name] is not None:
            lines.setdefault(_label_of(row, rows), {})[row["world_size"]] = row[name]
    return lines


def _title(tree: Mapping[str, Any]) -> str:
    model, workload = tree["model"], tree["workload"]
    size = f"{model['class']}, {format_count(model['num_params'])} parameters"
    return f"{size}, {workload['micro_batch']} × {workload['seq_len']:,} tokens per rank"


def _page(tree: Mapping[str, Any]) -> str:
    from hf_fsdp_plugin.estimate.charts import chart_html, html_document, table_html

    where = ", ".join(filter(None, [tree["device"]["name"] or tree["device"]["type"], tree["date"]]))
    parts = [f"<h1>{escape(_title(tree))}</h1><p>{escape(where)}</p>"]
    parts += map(chart_html, _charts_of(tree))
    parts += [table_html(title[:1].upper() + title[1:], table) for title, table in _tables(tree)]
    return html_document(_title(tree), "\n".join(parts))
