"""New figures of matplotlib, which is optional."""

from __future__ import annotations

from typing import Any

from hf_fsdp_plugin.problems import Problem, SpecError


def new_figure(title: str, width: float, height: float) -> Any:
    """Return an empty figure with a title.

    Args:
        width, height: in inches.

    Raises:
        SpecError: matplotlib is not installed (FSDP-E834).
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        message = "--png needs matplotlib, which is not installed."
        fix = 'Install it (pip install "hf_fsdp_plugin[plots]"), or use --html.'
        raise SpecError([Problem(code="FSDP-E834", message=message, fix=fix)]) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title, fontsize=12)
    return figure
