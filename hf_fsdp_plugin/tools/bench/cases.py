"""The cases of ``hf-fsdp bench``: numbers of ranks × strategies × FSDP versions, and the systems that run each.

Also what the ranks get: the workload and the tasks. Imports no torch, because the command line reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import plural

System = Literal["plugin", "stock"]
"""This package, or Accelerate without it."""
DDP: Final = "ddp"
OFFLOAD: Final = "offload"
TITLES: Final[Mapping[str, str]] = {
    DDP: "DDP",
    "shard_grad_op": "ZeRO-2",
    "full_shard": "ZeRO-3",
    "no_shard": "no_shard",
    "hybrid_shard": "hybrid ZeRO-3",
    "hybrid_shard_zero2": "hybrid ZeRO-2",
    OFFLOAD: "ZeRO-3, offload",
}
"""Name of a strategy in ``--strategies`` -> its name in a table."""
WORKLOAD: Final[Mapping[str, tuple[int, str]]] = {
    "micro_batch": (1, "samples per rank and step"),
    "seq_len": (512, "tokens per sample"),
    "steps": (5, "steps of a timed block"),
    "warm_up": (2, "steps of a case before its blocks"),
    "blocks": (5, "timed blocks of a case"),
}
"""Number of the workload -> its default and its meaning."""
JOB_FILE: Final = "job.pickle"
"""The file with the :class:`WorldJob` of the ranks. For each group of cases they write ``NUMBER.json`` beside it."""
_SMALLEST_HYBRID: Final = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination of a number of ranks, a strategy and an FSDP version, and the system that runs it.

    Attributes:
        strategy: a key of :data:`TITLES`.
        version: FSDP version; 0 for DDP.
    """

    world_size: int
    strategy: str
    version: int = 0
    system: System = "plugin"

    @property
    def label(self) -> str:
        """The case without the number of ranks: ``FSDP2 full_shard``."""
        return "DDP" if self.strategy == DDP else f"FSDP{self.version} {self.strategy}"

    @property
    def name(self) -> str:
        """The name of the case, unique in a benchmark: ``2 ranks, FSDP2 full_shard, stock``."""
        return f"{plural(self.world_size, 'rank')}, {self.label}{'' if self.system == 'plugin' else ', stock'}"

    @property
    def overrides(self) -> list[str]:
        """``NAME=VALUE`` of every setting that the case sets, with the precedence of ``--set``."""
        values: dict[str, Any] = {"launch.num_processes": self.world_size, "launch.num_machines": 1}
        if self.strategy != DDP:
            values |= {
                "launch.distributed_type": "FSDP",
                "fsdp.version": self.version,
                "sharding.strategy": "full_shard" if self.strategy == OFFLOAD else self.strategy,
                "offload.params": str(self.strategy == OFFLOAD).lower(),
            }
        if self.is_hybrid:
            values |= {"mesh.replicate": 2, "mesh.shard": self.world_size // 2}
        return [f"{name}={value}" for name, value in values.items()]

    @property
    def is_hybrid(self) -> bool:
        return self.strategy in STRATEGIES and STRATEGIES[self.strategy].hybrid

    @property
    def impossible(self) -> str:
        """Why no plan of this number of ranks has the strategy; empty if one may have it."""
        if self.is_hybrid and (self.world_size < _SMALLEST_HYBRID or self.world_size % 2):
            return f"two replicas of at least two ranks need an even number of at least {_SMALLEST_HYBRID} ranks"
        return ""


CaseGroup = tuple[Case, ...]
"""A case of this package, and the same case of the systems with which it is compared."""


@dataclass(frozen=True, kw_only=True)
class WorldJob:
    """What the ranks of one world measure.

    Attributes:
        workload: what every case trains, and how often, by the names of :data:`WORKLOAD`.
        groups: the cases. Those of a group are built together, and their blocks alternate.
    """

    model: str
    device: str
    threads: int
    workload: Mapping[str, int]
    groups: Sequence[CaseGroup]


def why_not_in_stock(case: Case, device: str, *, prefetches: bool = False) -> str:
    """Return why stock Accelerate cannot run a case on a type of device; empty if it can.

    Args:
        prefetches: whether the settings have another prefetch than FSDP's default.
    """
    if case.strategy == DDP:
        return "DDP is run by stock Accelerate itself"
    if case.is_hybrid:
        # Its parallelism_config makes a mesh for FSDP2 on accelerators, but is refused on CPU ranks.
        return "Accelerate passes no mesh to FSDP1, and has no hybrid strategy under FSDP2"
    if case.version == 1:
        return ""
    if prefetches:
        return "Accelerate has no prefetch setting under FSDP2"
    if case.strategy == OFFLOAD and device == "cpu":
        return "Accelerate pins the memory of FSDP2's offload, which needs an accelerator"
    return "Accelerate has no no_shard under FSDP2" if case.strategy == "no_shard" else ""
