"""The tables of the measurements of the diagnosis of hangs, for ``update_results.py``."""

from __future__ import annotations

from typing import Any


def hangs(result: dict[str, Any]) -> list[str]:
    """One row per kind: for each launcher the codes, the longest time to the message, and how many runs are named."""
    runs = [{"launcher": "hf-fsdp", **run} for run in result["runs"]]
    launchers = list(dict.fromkeys(run["launcher"] for run in runs))
    lines = [f"| kind | {' | '.join(launchers)} |", "|---" * (len(launchers) + 1) + "|"]
    for kind in dict.fromkeys(run["kind"] for run in runs):
        cells = [_cell([run for run in runs if (run["kind"], run["launcher"]) == (kind, each)]) for each in launchers]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    counts = []
    for each in launchers:
        passed = [run["passed"] for run in runs if run["launcher"] == each]
        counts.append(f"{each} {sum(passed)} of {len(passed)}")
    return [
        *lines,
        "",
        f"Runs that name the rank, the unit or the collective: {', '.join(counts)}. Limit "
        f"{result['limit_seconds']:g} s; the seconds are the longest from the fault to the message.",
    ]


def _cell(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return "–"
    codes = "/".join(sorted({run["code"] for run in runs if run["passed"]}))
    seconds = max((run["seconds"] for run in runs if run["passed"]), default=0.0)
    missing = sum(not run["passed"] for run in runs)
    failed = f"**{missing} not named**" if missing else ""
    named = f"{codes}, {seconds:.1f} s ({len(runs) - missing})" if codes else ""
    return ", ".join(part for part in (named, failed) if part)
