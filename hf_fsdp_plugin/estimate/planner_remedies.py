"""What would fit, if nothing does: the smallest change of one thing at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from hf_fsdp_plugin.estimate.planner_evaluator import Evaluator, Subject
from hf_fsdp_plugin.estimate.planner_space import Choice, Sharding
from hf_fsdp_plugin.text import format_bytes

_MAX_FACTOR: Final = 64
"""Largest factor by which the number of machines is multiplied."""
_MIN_LENGTH: Final = 256


def remedies(subject: Subject, global_batch: int, limit: int) -> tuple[str, ...]:
    """Return the changes after which the settings with the least memory fit, one sentence each.

    The settings are full_shard, full checkpointing with offloaded activations and micro-batches of one sample; with and
    without offload of parameters.
    """
    return tuple(_found(subject, global_batch, limit))


def _found(subject: Subject, global_batch: int, limit: int) -> Iterator[str]:
    for offload in (False, True):
        with_offload = " and offload of parameters" if offload else ""
        if (more := _more_machines(subject, limit, offload=offload)) is not None:
            machines, peak = more
            ranks = machines * subject.gpus_per_machine
            batch = f", with a global batch of at least {ranks}" if global_batch < ranks else ""
            yield (
                f"{ranks} GPUs on {machines} machines{with_offload} would fit with {_size(peak)} per GPU{batch}: "
                "full_shard, full activation checkpointing with offload."
            )
        if (shorter := _shorter(subject, limit, offload=offload)) is not None:
            length, peak = shorter
            yield f"Sequences of {length:,} tokens{with_offload} would fit with {_size(peak)} per GPU."
    if subject.optimizer == "adamw":
        peak = _smallest(replace(subject, optimizer="adamw_8bit"), offload=False)
        if peak <= limit:
            yield f"AdamW with 8-bit state (adamw_8bit) would fit with {_size(peak)} per GPU."


def _more_machines(subject: Subject, limit: int, *, offload: bool) -> tuple[int, int] | None:
    factor = 2
    while factor <= _MAX_FACTOR:
        machines = subject.num_machines * factor
        peak = _smallest(replace(subject, num_machines=machines), offload=offload)
        if peak <= limit:
            return machines, peak
        factor *= 2
    return None


def _shorter(subject: Subject, limit: int, *, offload: bool) -> tuple[int, int] | None:
    length = subject.seq_len // 2
    while length >= _MIN_LENGTH:
        peak = _smallest(replace(subject, seq_len=length), offload=offload)
        if peak <= limit:
            return length, peak
        length //= 2
    return None


def _smallest(subject: Subject, *, offload: bool) -> int:
    """Return the memory that the settings with the least memory need."""
    sharding = Sharding(strategy="full_shard", shard=subject.world_size, replicate=1)
    choice = Choice(
        sharding=sharding, checkpointing="full", offload_activations=True, offload_params=offload, micro_batch=1,
        accumulation=1, sync_each_batch=False,
    )  # fmt: skip
    return Evaluator(subject, None).memory(choice).needed_bytes


def _size(size: int) -> str:
    return format_bytes(size, binary=True)
