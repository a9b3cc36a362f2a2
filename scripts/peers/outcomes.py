"""Compares the outcomes of a suite without and with the plugin, and explains differences by a table."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ABSENT = "not run"
UNFINISHED = "not finished"
_RANKS = ("passed", "skipped", UNFINISHED, "failed")
"""Kinds of outcomes. The last one among the reports of a test is that of the test."""

Outcomes = Mapping[str, tuple[str, str]]
"""Test -> its outcome and the first lines of its error."""


def read_outcomes(file: Path) -> dict[str, tuple[str, str]]:
    """Return the outcomes that a run has written, with *not finished* for a test that did not end."""
    found: dict[str, tuple[str, str]] = {}
    begun: dict[str, None] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        row = json.loads(line)
        if row["outcome"] == "begun":
            begun[row["test"]] = None
        elif row["test"] not in found or _rank(row["outcome"]) > _rank(found[row["test"]][0]):
            found[row["test"]] = (row["outcome"], row["message"])
    return dict.fromkeys(begun, (UNFINISHED, "")) | found


def _rank(outcome: str) -> int:
    return _RANKS.index(outcome.partition(" (")[0])


def count(outcomes: Outcomes) -> dict[str, int]:
    """Return the number of tests of each kind of outcome."""
    found = Counter(outcome.partition(" (")[0] for outcome, _ in outcomes.values())
    return {kind: found[kind] for kind in _RANKS if found[kind]}


def compare(without: Outcomes, with_plugin: Outcomes) -> list[dict[str, str]]:
    """Return the tests whose outcomes differ. Failures with exceptions of other types differ, too."""
    rows = []
    for test in sorted({*without, *with_plugin}):
        first, second = (run.get(test, (ABSENT, "")) for run in (without, with_plugin))
        if first[0] != second[0]:
            rows.append({"test": test, "without": first[0], "with": second[0], "message": second[1] or first[1]})
    return rows


def explain(difference: Mapping[str, str], explained: Mapping[str, str]) -> str:
    """Return the reason of the first pattern that matches a difference, or an empty text.

    Args:
        explained: pattern -> reason. A pattern has the form ``TEST: WITHOUT -> WITH``; ``*`` matches any text.
    """
    line = f"{difference['test']}: {difference['without']} -> {difference['with']}"
    return next((reason for pattern, reason in explained.items() if _matches(line, pattern)), "")


def _matches(line: str, pattern: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), line) is not None


def unexplained(results: Mapping[str, Any], explained: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the differences that have no reason, as ``PEER TEST``."""
    return [
        f"{peer} {row['test']}"
        for peer, found in results.items()
        for cell in found["files"].values()
        for row in cell["differences"]
        if not explain(row, explained.get(peer, {}))
    ]


def table(results: Mapping[str, Any], explained: Mapping[str, Mapping[str, str]]) -> str:
    """Return the Markdown table of all suites, and the reasons of their differences."""
    lines = [
        "| suite | tests of version | installed | files | passed without the plugin | passed with it | failed in both "
        "| skipped | differences | explained |",
        "|" + "---|" * 10,
    ]
    for peer, found in results.items():
        cells = list(found["files"].values())
        numbers = [_sum(cells, "without", "passed"), _sum(cells, "with", "passed"), _failed_in_both(cells)]
        differences = [row for cell in cells for row in cell["differences"]]
        num_explained = sum(bool(explain(row, explained.get(peer, {}))) for row in differences)
        versions = ", ".join(sorted({cell["checkout"] for cell in cells}))
        row = [peer, versions, found["installed"], len(cells), *numbers, _sum(cells, "without", "skipped")]
        lines.append("| " + " | ".join(map(str, (*row, len(differences), num_explained))) + " |")
    reasons = Counter(
        reason
        for peer, found in results.items()
        for cell in found["files"].values()
        for row in cell["differences"]
        if (reason := explain(row, explained.get(peer, {})))
    )
    lines += [
        "",
        *(f"- {reason} ({number} {'test' if number == 1 else 'tests'})" for reason, number in reasons.items()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _sum(cells: Iterable[Mapping[str, Any]], run: str, kind: str) -> int:
    return sum(cell[run].get(kind, 0) for cell in cells)


def _failed_in_both(cells: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of failed tests without the plugin, less those that have another outcome with it."""
    return sum(
        cell["without"].get("failed", 0) - sum(row["without"].startswith("failed") for row in cell["differences"])
        for cell in cells
    )
