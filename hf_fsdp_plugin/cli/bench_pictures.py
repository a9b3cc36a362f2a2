"""The options of ``hf-fsdp bench`` that write pictures: ``--html`` and ``--png``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.cli.bench_output import label_of, tables
from hf_fsdp_plugin.cli.plan.output import write_file
from hf_fsdp_plugin.estimate.charts import Chart, chart_html, charts_image, html_document, rank_chart, table_html
from hf_fsdp_plugin.text import format_count


def write_pictures(args: argparse.Namespace, tree: Mapping[str, Any]) -> list[str]:
    """Write the files and return their names.

    Raises:
        SpecError: matplotlib is missing (FSDP-E834), or a file cannot be written (FSDP-E835).
    """
    written = []
    for target, content in ((args.html, _page), (args.png, _image)):
        if target is not None:
            write_file(Path(target), content(tree))
            written.append(target)
    return written


def charts_of(tree: Mapping[str, Any]) -> list[Chart]:
    """Return throughput and efficiency over the number of ranks, with a line per strategy."""
    rows = [row for row in tree["cases"] if row["system"] == "plugin"]
    return [
        rank_chart(title="Throughput of all ranks", lines=_lines(rows, "tokens_per_second"), unit="tokens/s"),
        rank_chart(title="Efficiency", lines=_lines(rows, "efficiency"), unit="of the smallest world", rule=1.0),
    ]


def _lines(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, dict[int, float]]:
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        if row[name] is not None:
            lines.setdefault(label_of(row, rows), {})[row["world_size"]] = row[name]
    return lines


def _title(tree: Mapping[str, Any]) -> str:
    model, workload = tree["model"], tree["workload"]
    size = f"{model['class']}, {format_count(model['num_params'])} parameters"
    return f"{size}, {workload['micro_batch']} × {workload['seq_len']:,} tokens per rank"


def _page(tree: Mapping[str, Any]) -> bytes:
    where = ", ".join(filter(None, [tree["device"]["name"] or tree["device"]["type"], tree["date"]]))
    parts = [f"<h1>{escape(_title(tree))}</h1><p>{escape(where)}</p>"]
    parts += map(chart_html, charts_of(tree))
    parts += [table_html(title[:1].upper() + title[1:], table) for title, table in tables(tree)]
    return html_document(_title(tree), "\n".join(parts)).encode()


def _image(tree: Mapping[str, Any]) -> bytes:
    return charts_image(_title(tree), [charts_of(tree)])
