"""The tables of ``hf-fsdp bench``: throughput, memory, efficiency, and the comparison with stock Accelerate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_fsdp_plugin.integrations.bench import DDP, TITLES
from hf_fsdp_plugin.integrations.bench.results import ResultRow
from hf_fsdp_plugin.text import format_count, format_memory, format_table, plural


def bench_text(tree: Mapping[str, Any]) -> str:
    """Return all tables of a result."""
    model, workload = tree["model"], tree["workload"]
    device = tree["device"]["name"] or tree["device"]["type"]
    parts = [
        f"{model['class']}, {format_count(model['num_params'])} parameters, on {device}; "
        f"{workload['micro_batch']} × {workload['seq_len']:,} tokens per rank and step; medians of "
        f"{plural(workload['rounds'] * workload['blocks'], 'block')} of {plural(workload['steps'], 'step')}"
    ]
    rows = [row for row in tree["cases"] if row["system"] == "plugin"]
    source = next((row["peak_source"] for row in rows if row["peak_source"]), "not measured")
    tables: list[tuple[str, Callable[[ResultRow, ResultRow | None], str]]] = [
        ("samples/s of all ranks, and difference from DDP", _throughput),
        ("tokens/s of all ranks, and half the interquartile range", _tokens),
        (f"peak memory of a rank ({source})", _peak),
    ]
    if len({row["world_size"] for row in rows if row["efficiency"] is not None}) > 1:
        tables.append(("efficiency: throughput of a rank over that in the smallest world", _efficiency))
    parts += [f"{title}\n{_grid(rows, cell)}" for title, cell in tables]
    if tree["comparisons"]:
        parts.append(
            f"this package against stock Accelerate, on the same settings\n{_comparisons(tree['comparisons'])}"
        )
    return "\n\n".join(parts)


def _grid(rows: Sequence[ResultRow], cell: Callable[[ResultRow, ResultRow | None], str]) -> str:
    """Return a table with a row per number of ranks and a column per strategy."""
    versions = {row["version"] for row in rows if row["strategy"] != DDP}

    def column_of(row: ResultRow) -> str:
        title = TITLES[row["strategy"]]
        return f"FSDP{row['version']} {title}" if len(versions) > 1 and row["strategy"] != DDP else title

    columns = list(dict.fromkeys(map(column_of, rows)))
    by_cell = {(row["world_size"], column_of(row)): row for row in rows}
    table = [["ranks", *columns]]
    for world in dict.fromkeys(row["world_size"] for row in rows):
        baseline = by_cell.get((world, TITLES[DDP]))
        cells = []
        for row in (by_cell[world, column] for column in columns):
            cells.append(cell(row, baseline) if row["step_seconds"] is not None else _why_not_measured(row))
        table.append([str(world), *cells])
    return format_table(table, right=range(1, len(columns) + 1))


def _why_not_measured(row: ResultRow) -> str:
    if row["status"] == "failed":
        return "out of memory" if "OutOfMemoryError" in row["reason"] else "failed"
    return "–"


def _throughput(row: ResultRow, baseline: ResultRow | None) -> str:
    own = row["samples_per_second"]
    text = f"{own:.3g}" if own < 1000 else f"{own:,.0f}"
    if baseline is None or baseline is row or baseline["samples_per_second"] is None:
        return text
    return f"{text} ({own / baseline['samples_per_second'] - 1:+.0%})"


def _tokens(row: ResultRow, _: ResultRow | None) -> str:
    low, high = row["step_quartiles"]
    return f"{row['tokens_per_second']:,.0f} ±{(high - low) / 2 / row['step_seconds']:.1%}"


def _peak(row: ResultRow, _: ResultRow | None) -> str:
    return "–" if row["peak_bytes"] is None else format_memory(row["peak_bytes"])


def _efficiency(row: ResultRow, _: ResultRow | None) -> str:
    return f"{row['efficiency']:.0%}"


def _comparisons(comparisons: Sequence[ResultRow]) -> str:
    table = [["case", "throughput", "95% interval", "in CPU time", "losses differ by"]]
    for row in comparisons:
        low, high = row["ratio_95"]
        ratio, interval = f"× {row['ratio']:.3f}", f"{low:.3f} to {high:.3f}"
        difference = f"{row['relative_loss_difference']:.1e}"
        table.append([row["case"], ratio, interval, f"× {row['cpu_ratio']:.3f}", difference])
    return format_table(table, right=range(1, 5))
