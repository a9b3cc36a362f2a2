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


def hangs_healthy(result: dict[str, Any]) -> list[str]:
    """One row per run of slow training without faults."""
    lines = ["| launcher | FSDP version | minutes | alarms | notices | exit code |", "|---|---|---|---|---|---|"]
    for run in result["runs"]:
        values = (run["version"], f"{run['minutes']:g}", run["alarms"], run["notices"], run["exit_code"])
        lines.append(f"| {run.get('launcher', 'hf-fsdp')} | {' | '.join(map(str, values))} |")
    return lines


def hang_overhead(result: dict[str, Any]) -> list[str]:
    """The cost of the records in a step."""
    low, high = result["ratio_median_95"]
    watcher = result.get("watcher_share")
    thread = (
        [f"| the thread that watches the ranks, as a part of a core | {watcher:.4%} |"] if watcher is not None else []
    )
    return [
        "| | |",
        "|---|---|",
        f"| collectives in a step | {result['calls_per_step']:.0f} |",
        f"| processor time of the record of a collective | {result['microseconds_per_call']:.2f} µs |",
        f"| their product, as a part of a step of {result['step_seconds']:.3f} s | {result['share']:.4%} |",
        *thread,
        f"| step with records / without, median of {result['pairs']} alternating pairs | {result['ratio_median']:.4f} "
        f"(95%: {low:.4f} to {high:.4f}) |",
        "",
        f"{result['model']}; {result['ranks']} CPU ranks, one thread each, FSDP2.",
    ]
