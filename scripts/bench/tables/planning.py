"""The tables of the measurements of prediction and planning."""

from __future__ import annotations

from typing import Any


def planner_time(result: dict[str, Any]) -> list[str]:
    head = ["model", "FSDP", "times", "CPU time", "compared", "of it other units", "fit", "best"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in result["rows"]:
        cells = (
            row["model"], row["version"], "yes" if row["times"] else "no", f"{row['cpu_seconds']:.1f} s", row["rows"],
            row.get("rows_with_other_units", "–"), row["fit"], row["best"] or "–",
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    note = f"Sequences of {result['seq_len']:,} tokens, 80 GB per GPU; times: with the figures of "
    return [*lines, "", f"{note}{result['machine_of_times']}."]


def closed_against_trace(result: dict[str, Any]) -> list[str]:
    """Return the summary, and the settings with the largest differences."""
    worst = sorted((row for row in result["rows"] if "error" in row), key=lambda row: -abs(row["error"]))[:10]
    lines = ["| setting with the largest differences | device | closed form / traced - 1 |", "|---|---|---|"]
    lines += [f"| {row['point'].replace(',', ', ')} | {row['device']} | {row['error']:+.2%} |" for row in worst]
    refused = ", ".join(f"{code} {result['refused'].count(code)}" for code in sorted(set(result["refused"])))
    summary = f"{result['compared']} random settings: median {result['median']:.2%}, largest {result['worst']:+.2%}."
    return [*lines, "", summary, *([f"Refused by one of the methods: {refused}."] if refused else [])]


def reserved_memory(result: dict[str, Any]) -> list[str]:
    """Return the ratios of all points, and of their median and range."""
    names = {"reserved": "reserved", "needed": "needed", "expandable": "reserved, expandable segments"}
    lines = [f"| setting | allocated | {' | '.join(names.values())} |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        ratios = " | ".join(f"{row[name]:.2f}" for name in names)
        lines.append(f"| {row['point'].replace(',', ', ')} | {row['allocated_bytes'] / 2**30:.1f} GiB | {ratios} |")
    for kind in ("median", "least", "largest"):
        found = (f"{result['ratios'][name][kind]:.2f}" for name in names)
        lines.append(f"| {kind} | | {' | '.join(found)} |")
    return lines


def preflight_time(result: dict[str, Any]) -> list[str]:
    lines = ["| model | time | CPU time of the command and its ranks |", "|---|---|---|"]
    lines += [f"| {row['model']} | {row['seconds']:.0f} s | {row['cpu_seconds']:.0f} s |" for row in result["rows"]]
    seconds = result["first_question_seconds"]
    return [*lines, *(["", f"First question of `hf-fsdp config`: after {seconds:.2f} s."] if seconds else [])]


def migrate_proofs(result: dict[str, Any]) -> list[str]:
    lines = ["| config | from, to | mesh | losses | gradient norms | peak | settings return |", "|---" * 7 + "|"]
    for row in result["rows"]:
        cells = [row["config"], "failed", "", "", "", ""]
        if "mesh" in row:
            old, new = (row["peak_bytes"][side] for side in ("old", "new"))
            cells = [row["config"], f"FSDP{row['from_version']}, FSDP{row['to_version']}", row["mesh"]]
            cells += [f"{row['loss_difference']:.1e}", f"{row['norm_difference']:.1e}", f"{new / old - 1:+.1%}"]
        lines.append(f"| {' | '.join(cells)} | {'yes' if row['returns'] else 'no'} |")
    equal, returned = (f"{result[name]} of {result['configs']}" for name in ("equal", "returned"))
    return [*lines, "", f"Equal losses: {equal}. Settings return: {returned}."]
