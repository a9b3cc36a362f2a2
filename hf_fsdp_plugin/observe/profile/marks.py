"""The names of the marks that a profiled rank writes into torch's trace, and of torch's own marks that are read."""

from __future__ import annotations

from typing import Final, Literal

from hf_fsdp_plugin.estimate.results import CollectiveKind

Phase = Literal["forward", "backward", "clipping", "optimizer", "data", "checkpoint", "evaluation", "other"]
PHASES: Final[tuple[Phase, ...]] = (
    "forward",
    "backward",
    "clipping",
    "optimizer",
    "data",
    "checkpoint",
    "evaluation",
    "other",
)
"""Parts of a step. ``forward`` includes the computation of the loss; ``data`` is the time in the data loader on the
main thread; ``other`` is what no mark covers.
"""
PHASE_NAMES: Final[dict[Phase, str]] = {phase: phase for phase in PHASES} | {"data": "data loading"}

PREFIX: Final = "hf_fsdp::"
BOUNDARY: Final = f"{PREFIX}step"
"""An instant: the end of an optimizer step."""
WAIT: Final = f"{PREFIX}wait"
"""The main thread waits for a collective."""
UNIT: Final = f"{PREFIX}unit "
"""Followed by the name of a unit: its forward, also when it is recomputed."""
SAMPLE: Final = f"{PREFIX}sample"
"""An instant at which the memory was sampled."""
GATHER: Final = f"{PREFIX}gather "
REDUCE: Final = f"{PREFIX}reduce "
"""Followed by the name of a unit of FSDP1, which does not name its units in a trace."""
PHASE_MARKS: Final[dict[str, Phase]] = {f"{PREFIX}{phase}": phase for phase in PHASES}
"""Marks of this package -> phase."""
TORCH_PHASE_MARKS: Final[tuple[tuple[str, Phase], ...]] = (
    ("Optimizer.step#", "optimizer"),
    ("Optimizer.zero_grad#", "optimizer"),
    ("enumerate(DataLoader)#", "data"),
)
"""Prefixes of the marks that torch writes itself (``torch/optim/optimizer.py``, ``torch/utils/data/dataloader.py``)."""
TORCH_UNIT_MARKS: Final[tuple[tuple[str, str], ...]] = (
    ("FSDP::all_gather", "gather"),
    ("FSDP::post_backward_reduce", "reduce"),
)
"""Marks of FSDP2 around the calls of a unit's collectives, followed by `` (name)`` unless it is the root
(``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``).
"""
RATE_LIMITER: Final = "FullyShardedDataParallel.rate_limiter"
"""FSDP1 waits because two units are gathered (``limit_all_gathers``)."""

ISSUES: Final[dict[str, CollectiveKind]] = {
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::broadcast_": "broadcast",
}
"""Operations that start a collective (``torch/csrc/distributed/c10d/Ops.cpp``) -> kind."""
WORK_PREFIX: Final = "gloo:"
"""gloo's threads mark the execution of a collective, for example ``gloo:all_gather``. They run a reduce-scatter as
``gloo:all_reduce``.
"""
NCCL_KINDS: Final[tuple[tuple[str, CollectiveKind], ...]] = (
    ("AllGather", "all_gather"),
    ("ReduceScatter", "reduce_scatter"),
    ("AllReduce", "all_reduce"),
    ("Broadcast", "broadcast"),
)
"""Parts of the names of NCCL's kernels, such as ``ncclDevKernel_AllGather_RING_LL``, which RCCL has too."""
