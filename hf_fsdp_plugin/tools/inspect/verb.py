"""``hf-fsdp inspect``: Describe a checkpoint, or all checkpoints of a run, from metadata alone: format, step,
parameters, settings.

Examples::

    hf-fsdp inspect out/checkpoint-500
    hf-fsdp inspect out --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hf_fsdp_plugin import text
from hf_fsdp_plugin.checkpoint.checking.completeness import why_incomplete
from hf_fsdp_plugin.cli.output import OK, PROBLEMS, print_json, print_problems, print_result, text_width
from hf_fsdp_plugin.problems import CheckpointError, UsageError
from hf_fsdp_plugin.tools.common import check_folder, wrap_items
from hf_fsdp_plugin.tools.inspect.summary import Summary, TensorType, checkpoints_of_run, summarize

_FILES_SHOWN = 20
_WIDTH = 112


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "a checkpoint of any kind, a Hugging Face folder, or a folder of checkpoints"
    parser.add_argument("checkpoint", help=about)
    parser.add_argument("--parameters", action="store_true", help="list every parameter")
    parser.add_argument("--optimizer", action="store_true", help="list the optimizer's groups and state")


def run(args: argparse.Namespace) -> int:
    """Print the summary. Return 0 for a complete checkpoint, 1 if there is none, 2 if the folder does not exist."""
    args.checkpoint = check_folder(args.checkpoint)
    paths = checkpoints_of_run(args.checkpoint)
    try:
        summary = summarize(args.checkpoint)
    except CheckpointError as error:
        if paths:  # the folder of a run is usually not a checkpoint
            return _run(args, paths)
        if args.json:
            print_json({"checkpoint": str(args.checkpoint), "complete": False, "problems": error.problems})
        else:
            print_problems(error.problems)
        return PROBLEMS
    table = f"\n\n{_table(_rows(paths))}" if paths and not args.json else ""
    shown = {"parameters": args.parameters, "optimizer": args.optimizer}
    print_result(args, summary.to_json(**shown), _text(summary, **shown) + table)
    if summary.incomplete is not None:
        print(text.printable(f"{summary.path}: {summary.incomplete}"), file=sys.stderr)
    return OK if summary.incomplete is None else PROBLEMS


def _run(args: argparse.Namespace, paths: list[Path]) -> int:
    """Print the summaries of all checkpoints of a run. Returns 0 if one is complete, else 1."""
    if not args.json and (args.parameters or args.optimizer):
        raise UsageError("--parameters and --optimizer need one checkpoint, or --json.")
    rows = _rows(paths)
    newest = next((path for path, summary, reason in rows if summary is not None and reason is None), None)
    summaries = [
        {"checkpoint": str(path), "complete": False, "incomplete": reason}
        if summary is None
        else summary.to_json(parameters=args.parameters, optimizer=args.optimizer)
        for path, summary, reason in rows
    ]
    print_result(args, {"run": str(args.checkpoint), "checkpoints": summaries, "newest_complete": newest}, _table(rows))
    if newest is None:
        print(f"{text.printable(str(args.checkpoint))}: none of the checkpoints is complete.", file=sys.stderr)
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
            known = (step, summary.kind, ranks, text.format_bytes(sum(summary.files.values())))
        lines.append((path.name, *known, "complete" if reason is None else f"incomplete: {reason}"))
    return text.format_table(lines, width=text_width())


def _text(summary: Summary, *, parameters: bool, optimizer: bool) -> str:
    lines = [f"{text.printable(str(summary.path))}: {'complete' if summary.incomplete is None else 'incomplete'}"]
    width = min(text_width() or _WIDTH, _WIDTH)
    for label, fact in _facts(summary):
        lines += wrap_items(text.printable(fact).split(", "), width, label=f"  {label:<10} ")
    if parameters:
        kinds = ((name, dtype, text.format_shape(shape)) for name, (dtype, shape) in summary.parameters.items())
        lines += ["", text.format_table([("parameter", "dtype", "shape"), *kinds])]
    if optimizer:
        lines += ["", *_optimizer(summary)]
    rows = [("file", "bytes"), *((f"  {name}", f"{size:,}") for name, size in summary.files.items())]
    lines += ["", *text.truncate_lines(text.format_table(rows).splitlines(), _FILES_SHOWN + 1)]
    return "\n".join(lines)


def _facts(summary: Summary) -> Iterable[tuple[str, str]]:
    """Yield the label and the text of each line."""
    manifest, dtypes = summary.manifest, summary.dtypes
    amounts = ", ".join(f"{dtype} {count:,}" if len(dtypes) > 1 else dtype for dtype, count in dtypes.items())
    model = f"{len(summary.distinct):,} parameters, {summary.num_elements:,} elements ({amounts})"
    kinds = ", ".join(dict.fromkeys([summary.format, summary.kind]))
    yield "format", f"{kinds}{'' if manifest else ', without a manifest'}"
    yield "step", "" if summary.step is None else f"{summary.step:,}"
    yield "ranks", "" if summary.world_size is None else str(summary.world_size)
    if manifest:
        yield "backend", f"{manifest.backend}, {manifest.strategy}, mesh {_pairs(manifest.mesh)}"
        yield "written", f"{manifest.created}{', in the background' if manifest.asynchronous else ''}"
    yield "model", f"{model}, {text.format_bytes(summary.model_bytes)}"
    if summary.state or summary.groups:
        keys = ", ".join(dict.fromkeys(key for entry in summary.state.values() for key in entry)) or "no state"
        yield "optimizer", f"{text.format_bytes(summary.optimizer_bytes)} ({keys}), groups: {len(summary.groups)}"
    yield "tied", "; ".join(" = ".join(tie) for tie in summary.ties)
    yield "files", f"{len(summary.files):,}, {text.format_bytes(sum(summary.files.values()))}"
    if manifest:
        yield "settings", _pairs(manifest.settings)
        sizes = {key: value for key, value in manifest.batch.items() if not isinstance(value, (list, dict))}
        yield "batch", _pairs(sizes)
    yield "versions", _pairs(summary.versions)


def _optimizer(summary: Summary) -> list[str]:
    lines = []
    for number, group in enumerate(summary.groups):
        rest = {key: value for key, value in group.items() if key != "params"}
        lines.append(f"group {number}: {len(group.get('params', ())):,} parameters, {text.printable(_pairs(rest))}")
    rows = [("state", "dtype", "shape")]
    for name, entry in summary.state.items():
        for key, value in entry.items():
            is_tensor = isinstance(value, TensorType)
            shown = (value.dtype, text.format_shape(value.shape)) if is_tensor else ("value", str(value))
            rows.append((f"{name} {key}", *shown))
    return [*lines, text.format_table(rows)]


def _pairs(table: Mapping[str, Any]) -> str:
    """Return ``name value, name value``: text without quotes, other values as JSON."""
    shown = {
        key: value if isinstance(value, str) and value else json.dumps(value, default=str, ensure_ascii=False)
        for key, value in table.items()
    }
    return ", ".join(map(" ".join, shown.items()))
