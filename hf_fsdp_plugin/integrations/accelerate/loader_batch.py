"""Batch sizes read from the data loaders of an Accelerator: per device, and of all ranks together."""

from __future__ import annotations

from typing import Any

from hf_fsdp_plugin.integrations.accelerate import private
from hf_fsdp_plugin.observe.report import BatchShape


def loader_batch(accelerator: Any) -> BatchShape | None:
    """Return the batch of the first data loader of an Accelerator that has a batch size; ``None`` without one."""
    for loader in private.prepared_dataloaders(accelerator):
        sampler: Any = getattr(loader, "batch_sampler", None)
        if size := getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None):
            if getattr(sampler, "split_batches", False):
                size //= sampler.num_processes
            return BatchShape(per_device=size, accumulation=accelerator.gradient_accumulation_steps)
    return None


def samples_at_once(loader: Any) -> int | None:
    """Return the samples that all ranks together read at once."""
    try:
        return int(loader.total_batch_size)
    except (AttributeError, TypeError):  # no batch size, or none that Accelerate knows
        return None
