"""The text of ``hf-fsdp bench``: throughput, memory, efficiency, prefetch, and comparisons with other systems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from hf_fsdp_plugin.integrations.bench.cases import DDP, SYSTEMS, TITLES
from hf_fsdp_plugin.text import format_bytes, format_count, format_table, plural

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
    for title, table in tables(tree):
        parts += ["", title, format_table(table, right=range(1, len(table[0])))]
    return "\n".join(parts)


def tables(tree: Mapping[str, Any]) -> list[tuple[str, Table]]:
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
    found += [(f"prefetch, {name}", table) for name, table in _prefetch_tables(rows)]
    if tree["comparisons"]:
        found.append(("this package against others, on the same settings", _comparisons(tree["comparisons"])))
    return found


def label_of(row: Row, rows: Sequence[Row]) -> str:
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
    columns = list(dict.fromkeys(label_of(row, rows) for row in rows))
    worlds = list(dict.fromkeys(row["world_size"] for row in rows))
    by_place = {(row["world_size"], label_of(row, rows)): row for row in rows}
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


def _prefetch_tables(rows: Sequence[Row]) -> list[tuple[str, Table]]:
    """Return a table for each setting that was measured with several prefetch policies."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["strategy"] != DDP and row["step_seconds"] is not None:
            groups.setdefault((row["world_size"], row["strategy"], row["version"]), []).append(row)
    found = []
    for (world, strategy, version), group in groups.items():
        if len(group) < 2:
            continue
        fastest = min(row["step_seconds"] for row in group)
        peaks = [row["peak_bytes"] for row in group if row["peak_bytes"] is not None]
        table = [["policy", "speed", "peak memory"]]
        for row in group:
            known = row["peak_bytes"] is not None and min(peaks) > 0
            peak = f"{row['peak_bytes'] / min(peaks) - 1:+.0%}" if known else "–"
            table.append([row["prefetch"], f"{fastest / row['step_seconds']:.0%}", peak])
        found.append((f"{plural(world, 'rank')}, FSDP{version} {strategy}", table))
    return found


def _comparisons(comparisons: Sequence[Row]) -> Table:
    table = [["case", "against", "throughput", "95% interval", "in CPU time", "losses differ by"]]
    for row in comparisons:
        low, high = row["ratio_95"]
        ratio, interval = f"× {row['ratio']:.3f}", f"{low:.3f} to {high:.3f}"
        difference = f"{row['relative_loss_difference']:.1e}"
        table.append([row["case"], SYSTEMS[row["vs"]], ratio, interval, f"× {row['cpu_ratio']:.3f}", difference])
    return table
