"""The tables of the measurements of the diagnosis of hangs, for ``update_results.py``."""

from __future__ import annotations

from typing import Any


def hangs(result: dict[str, Any]) -> list[str]:
    """One row per kind: the code and the seconds to the message of each version and way."""
    runs = result["runs"]
    ways = sorted({(run["version"], run["way"]) for run in runs})
    lines = [
        "| kind | " + " | ".join(f"FSDP{version}, {way}" for version, way in ways) + " |",
        "|---" * (len(ways) + 1) + "|",
    ]
    for kind in dict.fromkeys(run["kind"] for run in runs):
        cells = []
        for way in ways:
            found = [run for run in runs if run["kind"] == kind and (run["version"], run["way"]) == way]
            cells += [f"{run['code']}, {run['seconds']:.1f} s" if run["passed"] else "**not named**" for run in found]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    num_runs = len(runs)
    return [
        *lines,
        "",
        f"{result['num_passed']} of {num_runs} runs name the rank, the unit or the collective. Limit "
        f"{result['limit_seconds']:g} s; the seconds are those from the fault to the message.",
    ]


def hangs_healthy(result: dict[str, Any]) -> list[str]:
    """One row per run of slow training without faults."""
    lines = ["| FSDP version | minutes | alarms | notices | exit code |", "|---|---|---|---|---|"]
    return lines + [
        f"| {run['version']} | {run['minutes']:g} | {run['alarms']} | {run['notices']} | {run['exit_code']} |"
        for run in result["runs"]
    ]


def hang_overhead(result: dict[str, Any]) -> list[str]:
    """The cost of the records in a step."""
    low, high = result["ratio_median_95"]
    return [
        "| | |",
        "|---|---|",
        f"| collectives in a step | {result['calls_per_step']:.0f} |",
        f"| processor time of the record of a collective | {result['microseconds_per_call']:.2f} µs |",
        f"| their product, as a part of a step of {result['step_seconds']:.3f} s | {result['share']:.4%} |",
        f"| step with records / without, median of {result['pairs']} alternating pairs | {result['ratio_median']:.4f} "
        f"(95%: {low:.4f} to {high:.4f}) |",
        "",
        f"{result['model']}; {result['ranks']} CPU ranks, one thread each, FSDP2.",
    ]
