"""The cases of a benchmark: number of ranks × strategy × FSDP version × prefetch, and the systems that run each.

Also what the ranks get: the workload and the tasks. Imports no torch, because the command line reads it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from hf_fsdp_plugin.integrations.preflight.stages import EventLog
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import plural

System = Literal["plugin", "stock", "raw"]
DDP: Final = "ddp"
OFFLOAD: Final = "offload"
TITLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        DDP: "DDP",
        "shard_grad_op": "ZeRO-2",
        "full_shard": "ZeRO-3",
        "no_shard": "no_shard",
        "hybrid_shard": "hybrid ZeRO-3",
        "hybrid_shard_zero2": "hybrid ZeRO-2",
        OFFLOAD: "ZeRO-3, offload",
    }
)
"""Name of a strategy in ``--strategies`` -> its name in a table."""
PREFETCHES: Final[Mapping[str, tuple[str, bool]]] = MappingProxyType(
    {"pre": ("pre", False), "post": ("post", False), "none": ("none", False), "forward": ("pre", True)}
)
"""Name in ``--prefetch`` -> ``prefetch.backward`` and ``prefetch.forward``."""
SYSTEMS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "plugin": "this package",
        "stock": "stock Accelerate",
        "raw": "hand-written loop",
    }
)
"""What runs a case -> its name in a table."""
_SMALLEST_HYBRID: Final = 4
_JOB_FILE: Final = "job.pickle"
_EVENTS_FILE: Final = "events.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseSetting:
    """One point of the product.

    Attributes:
        strategy: a key of :data:`TITLES`.
        version: FSDP version; 0 for DDP.
        prefetch: a key of :data:`PREFETCHES`; empty for DDP.
    """

    world_size: int
    strategy: str
    version: int = 0
    prefetch: str = ""

    @property
    def label(self) -> str:
        """The setting without the number of ranks: ``FSDP2 full_shard, prefetch pre``."""
        if self.strategy == DDP:
            return "DDP"
        return f"FSDP{self.version} {self.strategy}, prefetch {self.prefetch}"

    @property
    def name(self) -> str:
        return f"{plural(self.world_size, 'rank')}, {self.label}"

    @property
    def overrides(self) -> list[str]:
        """``NAME=VALUE`` of every setting that the case sets, with the precedence of ``--set``."""
        values: dict[str, Any] = {"launch.num_processes": self.world_size, "launch.num_machines": 1}
        if self.strategy != DDP:
            backward, forward = PREFETCHES[self.prefetch]
            values |= {
                "launch.distributed_type": "FSDP",
                "fsdp.version": self.version,
                "sharding.strategy": "full_shard" if self.strategy == OFFLOAD else self.strategy,
                "offload.params": str(self.strategy == OFFLOAD).lower(),
                "prefetch.backward": backward,
                "prefetch.forward": str(forward).lower(),
            }
        if self.is_hybrid:
            values |= {"mesh.replicate": 2, "mesh.shard": self.world_size // 2}
        return [f"{name}={value}" for name, value in values.items()]

    @property
    def planned(self) -> CaseSetting:
        """The setting whose plan predicts this one: for DDP that without sharding, which has the same tensors."""
        if self.strategy != DDP:
            return self
        return CaseSetting(world_size=self.world_size, strategy="no_shard", version=2, prefetch="pre")

    @property
    def is_hybrid(self) -> bool:
        return self.strategy in STRATEGIES and STRATEGIES[self.strategy].hybrid

    @property
    def impossible(self) -> str:
        """Why no plan of this number of ranks has the strategy; empty if one may have it."""
        if self.is_hybrid and (self.world_size < _SMALLEST_HYBRID or self.world_size % 2):
            return f"two replicas of at least two ranks need an even number of at least {_SMALLEST_HYBRID} ranks"
        return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A setting and what runs it."""

    setting: CaseSetting
    system: System = "plugin"

    @property
    def name(self) -> str:
        """Unique in a benchmark: ``2 ranks, FSDP2 full_shard, prefetch pre, stock``."""
        return f"{self.setting.name}{'' if self.system == 'plugin' else f', {self.system}'}"

    def to_json(self) -> dict[str, Any]:
        return {"case": self.name, **asdict(self.setting), "system": self.system}


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchWorkload:
    """What every case trains, and how often.

    Attributes:
        micro_batch: samples of a rank in a step.
        seq_len: tokens of a sample.
        steps: steps of a block, which is timed as a whole.
        warm_up: steps of a case before its first block in a round.
        blocks: blocks of a case in a round.
        rounds: times that each case is built and measured.
    """

    micro_batch: int
    seq_len: int
    steps: int
    warm_up: int
    blocks: int
    rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Cases of one setting that are built together, so that their blocks alternate, in one round."""

    cases: tuple[Case, ...]
    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldJob:
    """What the ranks of one world measure."""

    model: str
    device: str
    workload: BenchWorkload
    tasks: tuple[Task, ...]

    def write(self, folder: Path) -> None:
        (folder / _JOB_FILE).write_bytes(pickle.dumps(self))

    @classmethod
    def read(cls, folder: Path) -> WorldJob:
        job: WorldJob = pickle.loads((folder / _JOB_FILE).read_bytes())
        return job


def events_of(folder: Path) -> EventLog:
    """Return the events of the ranks: ``begin``, ``measured`` and ``failed``."""
    return EventLog(folder / _EVENTS_FILE)


def all_settings(
    world_sizes: Sequence[int], strategies: Sequence[str], versions: Sequence[int], prefetches: Sequence[str]
) -> Iterator[CaseSetting]:
    """Yield every setting, the numbers of ranks in increasing order. DDP has neither versions nor prefetch."""
    for world_size in sorted(set(world_sizes)):
        for strategy in dict.fromkeys(strategies):
            if strategy == DDP:
                yield CaseSetting(world_size=world_size, strategy=DDP)
                continue
            for version in dict.fromkeys(versions):
                for prefetch in dict.fromkeys(prefetches):
                    yield CaseSetting(world_size=world_size, strategy=strategy, version=version, prefetch=prefetch)


def why_inexpressible(setting: CaseSetting, system: System, device: str) -> str:
    """Return why a system cannot run a setting on a type of device; empty if it can."""
    if setting.strategy == DDP:
        return "DDP is run by stock Accelerate itself" if system != "plugin" else ""
    if system == "stock" and setting.is_hybrid:
        # Its parallelism_config makes a mesh for FSDP2 on accelerators, but is refused on CPU ranks.
        return "Accelerate passes no mesh to FSDP1, and has no hybrid strategy under FSDP2"
    if setting.version == 1:
        return ""
    if system == "raw" and setting.prefetch == "post":
        return "FSDP2 has no argument for the backward prefetch `post`"
    if system == "stock" and setting.prefetch != "pre":
        return "Accelerate has no prefetch setting under FSDP2"
    if system == "stock" and setting.strategy == OFFLOAD and device == "cpu":
        return "Accelerate pins the memory of FSDP2's offload, which needs an accelerator"
    if system == "stock" and setting.strategy == "no_shard":
        return "Accelerate has no no_shard under FSDP2"
    return ""
