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
