"""The progress bar of sharding: bytes of parameters, and their rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from hf_fsdp_plugin.plan.units import UnitPlan
from hf_fsdp_plugin.progress import progress_bar

DELAY = 2.0
"""Seconds until the bar appears. Most models are sharded sooner."""


def with_progress(units: Sequence[UnitPlan], model: nn.Module) -> Iterator[UnitPlan]:
    """Yield the units of a model that is sharded in the loop. Shows how many bytes are done."""
    sizes = [sum(model.get_parameter(name).nbytes for name in unit.parameters) for unit in units]
    with progress_bar("sharding", sum(sizes), delay=DELAY) as update:
        for unit, size in zip(units, sizes, strict=True):
            yield unit
            update(size)
