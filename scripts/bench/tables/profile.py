"""The table of the verified suggestions of ``hf-fsdp profile``, for ``update_results.py``."""

from __future__ import annotations

from typing import Any


def suggestions(result: dict[str, Any]) -> list[str]:
    """One row per case: the promised and the measured gain of a step."""
    lines = [
        "| case | suggested | promised | measured (median) | of each pair | step before | after |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["cases"].values():
        promised = row["promised_seconds"]
        before, after = row["step_seconds"]
        cells = [
            row["what"],
            f"`{row['setting']}`: {row['value']}" if promised is not None else "**nothing**",
            _ms(promised) if promised is not None else "–",
            _ms(row["measured_seconds"]),
            ", ".join(map(_ms, row["gains"])),
            _ms(before),
            _ms(after),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [
        *lines,
        "",
        f"{result['ranks']} CPU ranks with gloo. A gain is the difference of a pair of runs without the profiler.",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
