"""``hf-fsdp inspect``: describes a checkpoint or a run from metadata."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint import Summary, checkpoints_of_run, summarize, why_incomplete
from hf_fsdp_plugin.cli.output import OK, PROBLEMS, USAGE, check_folder, print_json, print_problems, text_width
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.text import (
    fit_table,
    format_bytes,
    format_shape,
    format_table,
    printable,
    truncate_lines,
    wrap_items,
)

HELP = "Describe a checkpoint, or all checkpoints of a run, from metadata alone: format, step, parameters, settings."
EXAMPLES = ("hf-fsdp inspect out/checkpoint-500", "hf-fsdp inspect out --json")
_FILES_SHOWN = 20
_WIDTH = 112


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", type=Path, help="a checkpoint of any kind, a Hugging Face folder, or a folder of checkpoints"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument("--parameters", action="store_true", help="list every parameter")
    parser.add_argument("--optimizer", action="store_true", help="list the optimizer's groups and state")


def run(args: argparse.Namespace) -> int:
    """Print the summary. Return 0 for a complete checkpoint, 1 if there is none, 2 if the folder does not exist."""
    if not check_folder("inspect", args.checkpoint):
        return USAGE
    paths = checkpoints_of_run(args.checkpoint)
    try:
        summary = summarize(args.checkpoint)
    except CheckpointError as error:
        if paths:  # the folder of a run is usually not a checkpoint
            if not args.json and (args.parameters or args.optimizer):
                print("hf-fsdp inspect: --parameters and --optimizer need one checkpoint, or --json.", file=sys.stderr)
                return USAGE
            return _run(args, paths)
        if args.json:
            problems = [problem.to_json() for problem in error.problems]
            print_json({"checkpoint": str(args.checkpoint), "complete": False, "problems": problems})
        else:
            print_problems(error.problems)
        return PROBLEMS
    if args.json:
        print_json(summary.to_json(parameters=args.parameters, optimizer=args.optimizer))
    else:
        print(_text(summary, parameters=args.parameters, optimizer=args.optimizer))
        if paths:
            print(f"\n{_table(_rows(paths))}")
    if summary.incomplete is not None:
        print(printable(f"{summary.path}: {summary.incomplete}"), file=sys.stderr)
    return OK if summary.incomplete is None else PROBLEMS


def _run(args: argparse.Namespace, paths: list[Path]) -> int:
    rows = _rows(paths)
    complete = [path for path, summary, _ in rows if isinstance(summary, Summary) and summary.incomplete is None]
    newest = next(iter(complete), None)
    if args.json:
        summaries: list[Any] = []
        for path, summary, reason in rows:
            unreadable = {"checkpoint": str(path), "complete": False, "incomplete": reason}
            described = summary and summary.to_json(parameters=args.parameters, optimizer=args.optimizer)
            summaries.append(described or unreadable)
        tree = {"run": str(args.checkpoint), "checkpoints": summaries}
        print_json({**tree, "newest_complete": None if newest is None else str(newest)})
    else:
        print(_table(rows))
    if newest is None:
        print(f"{printable(str(args.checkpoint))}: none of the checkpoints is complete.", file=sys.stderr)
    return OK if newest is not None else PROBLEMS


CheckpointRow = tuple[Path, Summary | None, str | None]
"""A checkpoint, its summary if it is readable, and the reason why it is incomplete."""


def _rows(paths: Iterable[Path]) -> list[CheckpointRow]:
    rows: list[CheckpointRow] = []
    for path in paths:
        try:
            summary = summarize(path)
            rows.append((path, summary, summary.incomplete))
        except CheckpointError:
            rows.append((path, None, why_incomplete(path)))
    return rows


def _table(rows: Iterable[CheckpointRow]) -> str:
    lines = [("checkpoint", "step", "kind", "ranks", "size", "state")]
    for path, summary, reason in rows:
        known = ("-",) * 4
        if summary is not None:
            ranks = "-" if summary.world_size is None else str(summary.world_size)
            step = "-" if summary.step is None else f"{summary.step:,}"
            known = (step, summary.kind, ranks, format_bytes(sum(summary.files.values())))
        lines.append((path.name, *known, "complete" if reason is None else f"incomplete: {reason}"))
    return fit_table(lines, text_width())


def _text(summary: Summary, *, parameters: bool, optimizer: bool) -> str:
    lines = [f"{printable(str(summary.path))}: {'complete' if summary.incomplete is None else 'incomplete'}"]
    for label, text in _facts(summary):
        lines += wrap_items(printable(text).split(", "), min(text_width() or _WIDTH, _WIDTH), label=f"  {label:<10} ")
    if parameters:
        table = [("parameter", "dtype", "shape"), *((name, *_kind(kind)) for name, kind in summary.parameters.items())]
        lines += ["", format_table(table)]
    if optimizer:
        lines += ["", *_optimizer(summary)]
    rows = [("file", "bytes"), *((f"  {name}", f"{size:,}") for name, size in summary.files.items())]
    lines += ["", *truncate_lines(format_table(rows).splitlines(), _FILES_SHOWN + 1)]
    return "\n".join(lines)


def _facts(summary: Summary) -> list[tuple[str, str]]:
    manifest = summary.manifest
    dtypes = summary.dtypes
    amounts = ", ".join(f"{dtype} {count:,}" if len(dtypes) > 1 else dtype for dtype, count in dtypes.items())
    model = f"{len(summary.distinct):,} parameters, {summary.num_elements:,} elements ({amounts})"
    keys = dict.fromkeys(key for entry in summary.state.values() for key in entry)
    optimizer = f"{format_bytes(summary.optimizer_bytes)} ({', '.join(keys) or 'no state'})"
    format = ", ".join(dict.fromkeys([summary.format, summary.kind]))
    return [
        ("format", f"{format}{'' if manifest else ', without a manifest'}"),
        ("step", "" if summary.step is None else f"{summary.step:,}"),
        ("ranks", "" if summary.world_size is None else str(summary.world_size)),
        ("backend", f"{manifest.backend}, {manifest.strategy}, mesh {_pairs(manifest.mesh)}" if manifest else ""),
        ("written", f"{manifest.created}{', in the background' if manifest.asynchronous else ''}" if manifest else ""),
        ("model", f"{model}, {format_bytes(summary.model_bytes)}"),
        ("optimizer", f"{optimizer}, groups: {len(summary.groups)}" if summary.state or summary.groups else ""),
        ("tied", "; ".join(" = ".join(tie) for tie in summary.ties)),
        ("files", f"{len(summary.files):,}, {format_bytes(sum(summary.files.values()))}"),
        ("settings", _pairs(manifest.settings) if manifest else ""),
        ("batch", _pairs(_numbers(manifest.batch)) if manifest else ""),
        ("versions", _pairs(summary.versions)),
    ]


def _optimizer(summary: Summary) -> list[str]:
    lines = []
    for number, group in enumerate(summary.groups):
        rest = {key: value for key, value in group.items() if key != "params"}
        lines.append(f"group {number}: {len(group.get('params', ())):,} parameters, {printable(_pairs(rest))}")
    rows = [("state", "dtype", "shape")]
    for name, entry in summary.state.items():
        for key, value in entry.items():
            kind = isinstance(value, tuple) and len(value) == 2
            rows.append((f"{name} {key}", *(_kind(value) if kind else ("value", str(value)))))
    return [*lines, format_table(rows)]


def _kind(kind: tuple[str, tuple[int, ...]]) -> tuple[str, str]:
    return kind[0], format_shape(kind[1])


def _pairs(table: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_shown(value)}" for key, value in table.items())


def _numbers(table: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in table.items() if not isinstance(value, (list, dict))}


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, default=str, ensure_ascii=False)
