"""The marked sets: what CI does not run, when each ran last, and whether the code that it tests has changed since.

    python -m scripts.last_runs                          all sets
    python -m scripts.last_runs --stale                  those that should run again
    python -m scripts.last_runs --record NAME RESULT     for the program that runs a set, at its end

The dates are those of docs/results/last_runs.json and of the results in docs/results, whichever is later. A set is
stale if it has never run, has not passed, ran more than 30 days ago, or if a later commit changes its code.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts.bench.common import RESULTS, ROOT, commit
from scripts.bench.registry import BENCHMARKS, GPU_CHECK, Benchmark

FILE: Final = RESULTS / "last_runs.json"
MAX_DAYS: Final = 30
_PACKAGE: Final = "hf_fsdp_plugin"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSet:
    """What is run together.

    Attributes:
        code: paths of what it tests, and of its own programs.
    """

    name: str
    command: str
    code: tuple[str, ...] = (_PACKAGE,)


@dataclass(frozen=True, kw_only=True, slots=True)
class LastRun:
    """The last run of a set. ``date`` is a day, or a time in ISO format."""

    date: str
    commit: str
    result: str


def _of_benchmark(row: Benchmark) -> RunSet:
    command = (
        row.shell or f"python {row.program}" if row.shell or row.program else f"python -m scripts.bench {row.name}"
    )
    code = tuple(f"{_PACKAGE}/{path}" for path in row.code.split()) or (_PACKAGE,)
    return RunSet(name=row.name, command=f"{command} {row.arguments}".strip(), code=(*code, row.path()))


SETS: Final = (
    RunSet(name="slow_tests", command="bash scripts/test.sh --slow", code=(_PACKAGE, "tests")),
    RunSet(name="accelerator", command="bash scripts/test.sh --accelerator", code=(_PACKAGE, "tests/accelerator")),
    RunSet(
        name="screenshots",
        command="python -m scripts.update_docs --runs",
        code=(
            f"{_PACKAGE}/cli",
            f"{_PACKAGE}/tools",
            f"{_PACKAGE}/launcher",
            "scripts/screenshots.py",
            "scripts/templates",
        ),
    ),
    RunSet(name="coverage", command="bash scripts/coverage.sh", code=(_PACKAGE, "tests")),
    *map(_of_benchmark, (*BENCHMARKS, GPU_CHECK)),
)
"""The sets. Benchmarks have their rows in ``scripts/bench/benchmarks.yaml``."""


def record(name: str, result: str, file: Path = FILE) -> None:
    """Write that a set has run now.

    Raises:
        KeyError: there is no set of this name.
    """
    row = {row.name: row for row in SETS}[name]
    runs: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    runs[name] = {"command": row.command, "date": now, "commit": commit(), "result": result}
    file.write_text(json.dumps(dict(sorted(runs.items())), indent=1) + "\n", encoding="utf-8")


def last_run(name: str, results: Path = RESULTS) -> LastRun | None:
    """Return the last run of a set; ``None`` if none is known."""
    runs = []
    recorded = results / FILE.name
    if recorded.exists() and (row := json.loads(recorded.read_text(encoding="utf-8")).get(name)):
        runs.append(LastRun(date=row["date"], commit=row["commit"], result=row["result"]))
    measured = results / f"{name}.json"
    if measured.exists():
        tree = json.loads(measured.read_text(encoding="utf-8"))
        # Of a result that is measured in parts, the oldest part counts.
        if dates := sorted(_dates(tree)):
            runs.append(LastRun(date=dates[0], commit=tree.get("commit", ""), result=tree.get("result", "measured")))
    return max(runs, key=lambda run: run.date, default=None)


def _dates(tree: Any) -> Iterator[str]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if key == "date":
            yield value
        elif isinstance(value, (dict, list)):
            yield from _dates(value)


def changes(root: Path = ROOT) -> list[tuple[str, str]]:
    """Return the time and path of each change that git knows, or an empty list outside of a repository."""
    command = [
        "git",
        "log",
        "--format=time %cd",
        "--date=format-local:%Y-%m-%dT%H:%M:%S+00:00",
        "--name-only",
        "--",
        ".",
    ]
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, check=True, env={**os.environ, "TZ": "UTC"}
        )
    except (OSError, subprocess.CalledProcessError):
        return []
    found, time = [], ""
    for line in filter(None, done.stdout.splitlines()):
        if line.startswith("time "):
            time = line.removeprefix("time ")
        else:
            found.append((time, line))
    return found


def changed_since(row: RunSet, date: str, all_changes: Sequence[tuple[str, str]]) -> set[str]:
    """Return the files of a set's code that commits after a date have changed. A day ends at midnight."""
    end = date if "T" in date else f"{date}T23:59:59+00:00"
    return {
        path
        for time, path in all_changes
        if time > end and any(path == code or path.startswith(f"{code}/") for code in row.code)
    }


def state(row: RunSet, all_changes: Sequence[tuple[str, str]], today: datetime.date) -> tuple[str, str]:
    """Return how the last run is shown, and why the set is stale; the reason is empty if it is not."""
    run = last_run(row.name)
    if run is None:
        return "never", "has never run"
    days = (today - datetime.date.fromisoformat(run.date[:10])).days
    changed = len(changed_since(row, run.date, all_changes))
    reasons = [
        *([f"ran {days} days ago"] if days > MAX_DAYS else []),
        *([f"{changed} files of its code have changed"] if changed else []),
        *([run.result] if run.result not in ("passed", "measured") else []),
    ]
    return f"{run.date[:10]} {run.commit or '-':<10} {run.result}", ", ".join(reasons)


def table(*, only_stale: bool = False) -> list[str]:
    """Return a line for each set."""
    all_changes, today = changes(), datetime.datetime.now(datetime.UTC).date()
    lines = []
    for row in SETS:
        shown, reason = state(row, all_changes, today)
        if reason or not only_stale:
            lines.append(f"{row.name:<24} {shown:<32} {reason or 'up to date'}: {row.command}")
    return lines


def notice() -> str:
    """Return one line about the stale sets; an empty one if there are none."""
    all_changes, today = changes(), datetime.datetime.now(datetime.UTC).date()
    reasons = [state(row, all_changes, today)[1] for row in SETS]
    old = sum("never" in reason or "days ago" in reason for reason in reasons)
    stale = sum(map(bool, reasons))
    if not stale:
        return ""
    return (
        f"{stale} of {len(SETS)} sets that CI does not run are stale, {old} of them older than {MAX_DAYS} days or "
        "without a run: python -m scripts.last_runs --stale"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stale", action="store_true", help="only sets that should run again")
    parser.add_argument("--record", nargs=2, metavar=("NAME", "RESULT"), help="write that a set has run now")
    args = parser.parse_args()
    if args.record:
        try:
            record(*args.record)
        except KeyError as error:
            parser.error(f"there is no set {error.args[0]!r}. python -m scripts.last_runs lists the names.")
        return 0
    print("\n".join(table(only_stale=args.stale)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
