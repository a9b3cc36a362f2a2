"""The file of results: rows are merged by name, FSDP version and number of ranks. Its table for docs/results.md."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.common import ROOT

Row = dict[str, Any]
NOT_SHOWN = (
    "**One GPU.** One rank has nobody to communicate with: FSDP2 gathers and reduces nothing, and FSDP1 does not "
    "shard. Not shown: NCCL, the overlap of communication and computation, prefetch, memory of gathered units, hybrid "
    "sharding, the diagnosis of hangs, and contexts on the GPUs of other ranks. They need two GPUs."
)
_CODE = ("hf_fsdp_plugin/**/*.py", "scripts/bench/gpu_checks/*.py", "scripts/bench/measure/gpu_check.py",
         "scripts/bench/common.py", "scripts/bench/measure/memory_points.py")  # fmt: skip


def code_version() -> str:
    """Return a hash of the code that a result depends on. A copy of the repository may have no history."""
    contents = hashlib.sha256()
    for file in sorted({file for pattern in _CODE for file in ROOT.glob(pattern)}):
        contents.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return contents.hexdigest()[:12]


def row_key(row: Row) -> tuple[str, int, int]:
    return row["name"], row["version"], row["ranks"]


class Results:
    """The rows of a file, which is written after each case.

    Args:
        path: ``None`` for no file.
        head: what describes this machine.
        code: :func:`code_version`.

    Raises:
        ValueError: the file is not one of results, or is of another device.
    """

    def __init__(self, path: Path | None, head: Row, code: str) -> None:
        self.path, self._head, self._code = path, head, code
        self.rows: dict[tuple[str, int, int], Row] = {}
        if path is not None and path.exists():
            try:
                tree = json.loads(path.read_text())
                self.rows = {row_key(row): row for row in tree["rows"]}
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is not a file of results: {error!r}. Pass another one with --out.") from None
            if tree["device"] != head["device"]:
                raise ValueError(
                    f"{path} has results of {tree['device']}, and this machine has {head['device']}. "
                    "Pass another file with --out."
                )

    def has(self, key: tuple[str, int, int], *, any_code: bool) -> bool:
        """Whether the file has a row of this code, or of any code."""
        row = self.rows.get(key)
        return row is not None and (any_code or row["code"] == self._code)

    def add(self, row: Row) -> None:
        self.rows[row_key(row)] = {**row, "code": self._code}
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            tree = {**self._head, "rows": list(self.rows.values())}
            # Renamed, so that a command that is killed does not leave half a file.
            temporary = self.path.with_suffix(".part")
            temporary.write_text(json.dumps(tree, indent=2) + "\n")
            temporary.replace(self.path)


def table(rows: Sequence[Row]) -> list[str]:
    """Return the table of rows as Markdown: one line per name and number of ranks, with the plain line of each."""
    by_name: dict[tuple[str, int], dict[int, Row]] = {}
    for row in rows:
        by_name.setdefault((row["name"], row["ranks"]), {})[row["version"]] = row
    head = [] if any(row["ranks"] > 1 and not row.get("shared") for row in rows) else [NOT_SHOWN, ""]
    lines = [*head, "| check | ranks | FSDP2 | FSDP1 |", "|---|---|---|---|"]
    for (name, ranks), versions in by_name.items():
        cells = [versions[version]["status"] if version in versions else "" for version in (2, 1)]
        lines.append(f"| {name} | {ranks} | {' | '.join(cells)} |")
    notes = [f"- {_title(row)}: {_one_line(row['reason'])}" for row in rows if row["reason"]]
    codes = {row["code"] for row in rows}
    counts = ", ".join(f"{count} {status}" for status, count in _counts(rows).items())
    parts = f" Rows are of {len(codes)} versions of the code." if len(codes) > 1 else ""
    return [*lines, "", f"{counts}.{parts}", "", *notes]


def _counts(rows: Iterable[Row]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["status"]] = counts.get(row["status"], 0) + 1
    return counts


def _title(row: Row) -> str:
    ranks = f", {row['ranks']} ranks" if row["ranks"] > 1 else ""
    status = "" if row["status"] == "passed" else f", {row['status']}"
    return f"{row['name']}, FSDP{row['version']}{ranks}{status}"


def _one_line(text: str) -> str:
    line = " ".join(text.replace("|", "/").split())
    return line if len(line) <= 400 else f"{line[:400]} …"
