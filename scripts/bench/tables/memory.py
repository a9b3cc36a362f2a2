"""The tables of ``memory_error.py`` and ``memory_on_device.py``."""

from __future__ import annotations

from typing import Any

METHODS = {"traced": "traced", "closed_form": "closed form"}


def memory_error(result: dict[str, Any]) -> list[str]:
    """Return the lines of the summary, and of one row per point."""
    methods = [name for name in METHODS if name in result["summary"]]
    lines = ["| method | median error | largest error |", "|---|---|---|"]
    for name in methods:
        summary = result["summary"][name]
        lines.append(f"| {METHODS[name]} | {summary['median']:.3%} | {summary['worst']:+.3%} |")
    lines += ["", f"| point | measured | {' | '.join(METHODS[name] for name in methods)} | peak at |"]
    lines.append("|---|---|" + "---|" * len(methods) + "---|")
    for row in result["points"]:
        errors = " | ".join(f"{row['error'][name]:+.3%}" if name in row["error"] else "–" for name in methods)
        point = row["point"].replace(",", ", ")
        at = next(row["predicted"][name]["at"] for name in methods if name in row["predicted"])
        lines.append(f"| {point} | {row['measured_bytes'] / 1e6:.1f} MB | {errors} | {at} |")
    return lines


def memory_on_device(result: dict[str, Any]) -> list[str]:
    return [*memory_error(result), "", "On two ranks of a simulated accelerator ([devices.md](devices.md))."]
