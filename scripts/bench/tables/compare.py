"""Compare two results, and print which figures became slower, larger or worse.

    python -m scripts.bench.tables.compare HEAD~5 HEAD                        docs/results in two revisions of git
    python -m scripts.bench.tables.compare HEAD docs/results                  a revision, and the files as they are now
    python -m scripts.bench.tables.compare old.json new.json --threshold 5    two files; changes of more than 5%

A change counts if it exceeds the threshold and the spread: the quartiles of samples, or an interval that the result
contains. ``directions.yaml`` has which way is better for each. The exit code is 1 if a figure became worse, and 2
if a place cannot be read.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts.bench.common import ROOT
from scripts.bench.tables.directions import direction_of

_FOLDER: Final = "docs/results"
_IDENTITY: Final = ("case", "point", "run", "kind", "name", "vs", "launcher", "way", "ranks", "version", "range")
"""Keys whose values identify a row of a list."""
_WHERE: Final = ("machine", "device", "versions")


@dataclass(frozen=True, slots=True)
class Figure:
    """A value, and the interval in which it would be expected again; both ends are the value if that is unknown."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Change:
    """A figure in both results. ``relative`` is the change in the worse direction, and negative if it became better."""

    file: str
    name: str
    old: float
    new: float
    relative: float


def figures_of(tree: Any, name: str = "") -> Iterator[tuple[str, Figure]]:
    """Yield every numeric figure of a result with its name; a list of numbers is one figure, their median."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            inner = f"{name}/{key}" if name else key
            if _is_number(value):
                yield inner, Figure(float(value), *_interval(tree, key, float(value)))
            else:
                yield from figures_of(value, inner)
    elif isinstance(tree, list) and tree and all(map(_is_number, tree)):
        first, _, third = statistics.quantiles(tree, n=4, method="inclusive") if len(tree) > 1 else tree * 3
        yield name, Figure(statistics.median(tree), first, third)
    elif isinstance(tree, list):
        seen: dict[str, int] = {}
        for row in tree:
            identity = _identity(row)
            seen[identity] = seen.get(identity, 0) + 1
            suffix = f" #{seen[identity]}" if seen[identity] > 1 else ""
            yield from figures_of(row, f"{name}/{identity}{suffix}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _identity(row: Any) -> str:
    """Return the values that identify a row, without the ``/`` that separates keys."""
    if not isinstance(row, Mapping):
        return ""
    return ", ".join(str(row[key]) for key in _IDENTITY if isinstance(row.get(key), str | int)).replace("/", ":")


def _interval(tree: Mapping[str, Any], key: str, value: float) -> tuple[float, float]:
    """Return the interval of a figure from the keys beside it: ``X_95``, quartiles, or lowest and highest."""
    stem = key.rpartition("_")[0]
    for beside in (f"{key}_95", f"{key}_quartiles", f"{stem}_quartiles"):
        if isinstance(found := tree.get(beside), list) and len(found) == 2:
            return float(found[0]), float(found[1])
    if key == "ratio" and _is_number(tree.get("lowest")) and _is_number(tree.get("highest")):
        return float(tree["lowest"]), float(tree["highest"])
    return value, value


def compare(file: str, old: Any, new: Any, threshold: float) -> tuple[list[Change], list[str]]:
    """Return the figures that changed by more than the threshold and the spread, and those without a direction."""
    before, after = dict(figures_of(old)), dict(figures_of(new))
    changes, unknown = [], []
    for name in before.keys() & after.keys():
        row = direction_of(name)
        if row is None:
            unknown.append(name)
            continue
        if row.better == "not compared":
            continue
        first, second = before[name], after[name]
        a, b = (abs(first.value), abs(second.value)) if row.better == "nearer 0" else (first.value, second.value)
        worse = a - b if row.better == "larger" else b - a
        overlap = first.low <= second.high and second.low <= first.high and (first.low, second.low) != (a, b)
        if abs(worse) <= row.floor or abs(worse) <= threshold * abs(a) or overlap:
            continue
        changes.append(
            Change(file, name, first.value, second.value, worse / abs(a) if a else math.copysign(math.inf, worse))
        )
    return sorted(changes, key=lambda change: -change.relative), sorted(unknown)


def read(place: str) -> dict[str, Any]:
    """Return the results of a file, of a folder, or of a revision of git, by name of the file.

    Raises:
        ValueError: there is no such place, or a file is not JSON.
    """
    path = Path(place)
    if path.is_file():
        return {path.name: _parse(path.read_text(encoding="utf-8"), place)}
    if path.is_dir():
        return {file.name: _parse(file.read_text(encoding="utf-8"), str(file)) for file in sorted(path.glob("*.json"))}
    names = _git("ls-tree", "--name-only", place, f"{_FOLDER}/")
    if names is None:
        raise ValueError(f"{place} is neither a file, nor a folder, nor a revision of git.")
    found = {}
    for name in names.split():
        if name.endswith(".json"):
            found[Path(name).name] = _parse(_git("show", f"{place}:{name}") or "", f"{place}:{name}")
    return found


def _git(*words: str) -> str | None:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON: {error}") from error


def _pairs(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the results in both places; two single files are a pair whatever their names are."""
    if len(old) == len(new) == 1:
        return [(next(iter(new)), *old.values(), *new.values())]
    return [(name, old[name], new[name]) for name in sorted(old.keys() & new.keys()) if old[name] != new[name]]


def _show(changes: list[Change], title: str) -> None:
    if changes:
        print(f"\n{title}")
    for change in changes:
        print(f"  {change.file} {change.name}: {change.old:.6g} → {change.new:.6g} ({change.new - change.old:+.3g}, "
              f"{_percent(change)})")  # fmt: skip


def _percent(change: Change) -> str:
    if math.isinf(change.relative):
        return "from 0"
    return f"{abs(change.relative):.1%} {'worse' if change.relative > 0 else 'better'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="file, folder or revision")
    parser.add_argument("new", help="file, folder or revision")
    parser.add_argument("--threshold", type=float, default=10.0, metavar="PERCENT", help="default: 10")
    parser.add_argument("--all", action="store_true", help="also print what became better")
    args = parser.parse_args()
    try:
        pairs = _pairs(read(args.old), read(args.new))
    except (ValueError, OSError) as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    worse: list[Change] = []
    better: list[Change] = []
    for file, old, new in pairs:
        other = [
            key for key in _WHERE if isinstance(old, dict) and isinstance(new, dict) and old.get(key) != new.get(key)
        ]
        if other:
            print(f"{file}: {', '.join(other)} differ, so that the times may not be comparable.", file=sys.stderr)
        changes, unknown = compare(file, old, new, args.threshold / 100)
        worse += [change for change in changes if change.relative > 0]
        better += [change for change in changes if change.relative < 0]
        if unknown:
            print(
                f"{file}: no direction is known for {', '.join(unknown)}. Add them to directions.yaml.", file=sys.stderr
            )
    _show(worse, "worse:")
    if args.all:
        _show(better, "better:")
    print(f"\n{len(pairs)} results compared: {len(worse)} figures worse, {len(better)} better.")
    return 1 if worse else 0


if __name__ == "__main__":
    raise SystemExit(main())
