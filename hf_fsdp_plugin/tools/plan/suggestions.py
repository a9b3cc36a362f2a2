"""What ``hf-fsdp plan`` suggests besides settings: each line has its public source. None of it is measured here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.text import format_memory
from hf_fsdp_plugin.tools.plan.estimate.types import MemoryEstimate

_MANY_RANKS: Final = 64
"""Ranks from which pauses of single ranks are suggested to be avoided; an assumption."""


def suggest(plan: FsdpPlan, memory: MemoryEstimate, gpu_memory: int | None, ranks_per_machine: int) -> Iterator[str]:
    """Yield the suggestions for a plan on GPUs."""
    if plan.device_type != "cuda":
        return
    if plan.backend == "fsdp2" and plan.mesh.num_shards > ranks_per_machine:
        yield (
            "All-gathers and reduce-scatters share a communicator, which runs one at a time: "
            "model.set_separate_reduce_scatter_group() separates them (FSDPModule of torch 2.13, experimental)."
        )
    if plan.world_size >= _MANY_RANKS:
        yield (
            "All ranks wait for a rank whose garbage collector runs: call gc.disable(), and gc.collect(1) on all ranks "
            "at the same step, such as every 50 (gc_freq of torchtitan)."
        )
    is_large = memory.host_bytes > 0 or plan.world_size > ranks_per_machine
    if is_large and not plan.spec.launch.enable_cpu_affinity:
        yield (
            "On machines with several NUMA nodes, enable_cpu_affinity: true runs each rank on the cores of its GPU's "
            "node (set_numa_affinity in accelerate/utils/environment.py)."
        )
    if gpu_memory is not None and memory.needed_bytes <= gpu_memory < memory.total_bytes:
        yield (
            "PYTORCH_ALLOC_CONF=expandable_segments:True may lower the memory that is reserved but not allocated "
            "(CUDA semantics in torch's documentation); measure it."
        )
    if plan.spec.uses_fp8 and plan.spec.launch.dynamo_config.get("dynamo_backend", "no").lower() == "no":
        yield "Without compilation, layers in fp8 are slower than in bf16: set dynamo_backend (pytorch/ao issue 685)."
    if memory.rounding_bytes:
        yield (
            f"Of the CPU memory, {format_memory(memory.rounding_bytes)} per rank are lost because torch rounds pinned "
            "memory up to powers of two: PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1 turns this off from 1 MiB "
            "on (c10/core/AllocatorConfig.h of torch 2.13)."
        )
