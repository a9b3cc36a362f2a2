"""Check of data loaders that give the ranks different numbers of batches."""

from __future__ import annotations

from typing import Any

from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import plural


def check_even_batches(loader: Any) -> Problem | None:
    """Return a warning if a prepared data loader has more batches on some ranks than on others. No communication.

    The sampler of each rank knows the number of batches of all ranks, because it takes each n-th batch of the same
    sampler. Other kinds of loaders have as many batches on each rank, or their number is unknown.
    """
    from accelerate.data_loader import BatchSamplerShard

    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, BatchSamplerShard) or sampler.even_batches or sampler.drop_last or sampler.split_batches:
        return None
    try:
        num_each, num_longer = divmod(sampler.total_length, sampler.num_processes)
    except TypeError:  # a sampler without a length
        return None
    if not num_longer:
        return None
    longer = "rank 0 has" if num_longer == 1 else f"the first {num_longer} ranks have"
    message = (
        "even_batches=False gives the ranks different numbers of batches: "
        f"{longer} {plural(num_each + 1, 'batch', 'batches')}, the others {num_each}. Every forward of a sharded model "
        "is a collective call, so a loop over all batches fails on the ranks with more."
    )
    fix = (
        "Leave even_batches=True (gather_for_metrics() drops the repeated samples), set drop_last=True, or end the "
        f"loop after {num_each} batches on all ranks."
    )
    return Problem(code="FSDP-W690", message=message, fix=fix)
