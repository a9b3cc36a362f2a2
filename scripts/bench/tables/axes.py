"""The table of the benchmark of axes."""

from __future__ import annotations

from typing import Any


def axes(result: dict[str, Any]) -> list[str]:
    head = ["axes", "FSDP", "losses", "norms", "save", "merge and export", "resume without the axes"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, row in result["pairs"].items():
        lines.append(f"| {name} | 1 | {_refusal(row['fsdp1'])} | | | | |")
        run = row.get("fsdp2")
        if run is None:
            lines.append(f"| | 2 | {row.get('failed') or _refusal(row['refused'])} | | | | |")
            continue
        weights = "equal" if run["merged_equal"] and run["exported_equal"] else "differ"
        save = "verified, in the background" if run["verified"] and run["asynchronous"] else "differs"
        cells = (f"{run['losses']:.0e}", f"{run['norms']:.0e}", save, weights, f"{run['resumed_losses']:.0e}")
        lines.append(f"| | 2 | {' | '.join(cells)} |")
    note = "relative differences of losses and gradient norms from one process of the stock Trainer."
    return [*lines, "", f"4 gloo ranks, 8 for three axes, six steps in fp32; {note}"]


def _refusal(codes: list[str]) -> str:
    return f"refused: {', '.join(sorted(set(codes)))}"
