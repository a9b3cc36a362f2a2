"""The tables of ``memory_error.py`` and ``memory_on_device.py``."""

from __future__ import annotations

from typing import Any


def memory_error(result: dict[str, Any]) -> list[str]:
    """Return the lines of the summary, and of one row per point."""
    summary = result["summary"]["closed_form"]
    lines = [f"Median error {summary['median']:.3%}, largest {summary['worst']:+.3%}.", ""]
    lines += ["| point | measured | error of the prediction | peak at |", "|---|---|---|---|"]
    for row in result["points"]:
        point, measured = row["point"].replace(",", ", "), f"{row['measured_bytes'] / 1e6:.1f} MB"
        error, at = row["error"]["closed_form"], row["predicted"]["closed_form"]["at"]
        lines.append(f"| {point} | {measured} | {error:+.3%} | {at} |")
    return lines


def memory_on_device(result: dict[str, Any]) -> list[str]:
    return [*memory_error(result), "", "On two ranks of a simulated accelerator ([devices.md](devices.md))."]
