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
