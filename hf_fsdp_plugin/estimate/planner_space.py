"""The settings that the planner compares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from hf_fsdp_plugin.estimate.planner_units import GIVEN, Units
from hf_fsdp_plugin.spec.model import Checkpointing, Version
from hf_fsdp_plugin.strategies import STRATEGIES

CHECKPOINTING: Final[tuple[Checkpointing, ...]] = ("none", "selective", "full")
"""From the fastest to the one that needs least memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """A strategy and the sizes of its mesh."""

    strategy: str
    shard: int
    replicate: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One combination of settings.

    Attributes:
        offload_activations: whether what is saved for backward is moved to CPU memory.
        sync_each_batch: whether gradients are reduced after every micro-batch.
        units: the units, if they are others than those of the config or the model.
    """

    sharding: Sharding
    checkpointing: Checkpointing
    offload_activations: bool
    offload_params: bool
    micro_batch: int
    accumulation: int
    sync_each_batch: bool
    units: Units = GIVEN

    def settings(self, version: Version) -> dict[str, Any]:
        """Return the FSDP settings by canonical name, as the spec has them."""
        sharding = self.sharding
        strategy = STRATEGIES[sharding.strategy]
        mesh = {"mesh.shard": sharding.shard, "mesh.replicate": sharding.replicate} if strategy.hybrid else {}
        return {
            "fsdp.version": version,
            "sharding.strategy": sharding.strategy,
            **mesh,
            "activation.checkpointing": self.checkpointing,
            "activation.offload": self.offload_activations,
            "offload.params": self.offload_params,
            **dict(self.units.settings),
        }


def shardings(num_machines: int, gpus_per_machine: int) -> Iterator[Sharding]:
    """Yield the strategies, hybrid ones for each shard size that divides a machine or is a number of machines."""
    world = num_machines * gpus_per_machine
    for row in STRATEGIES.values():
        if not row.is_sharded:
            yield Sharding(strategy=row.name, shard=1, replicate=world)
        elif not row.hybrid:
            yield Sharding(strategy=row.name, shard=world, replicate=1)
        else:
            for shard in _shard_sizes(num_machines, gpus_per_machine):
                yield Sharding(strategy=row.name, shard=shard, replicate=world // shard)


def _shard_sizes(num_machines: int, gpus_per_machine: int) -> list[int]:
    world = num_machines * gpus_per_machine
    inside = {size for size in _powers(gpus_per_machine) if gpus_per_machine % size == 0} | {gpus_per_machine}
    across = {count * gpus_per_machine for count in _powers(num_machines) if num_machines % count == 0}
    return sorted(size for size in inside | across if 1 < size < world)


def micro_batches(global_batch: int, world_size: int) -> tuple[int, ...]:
    """Return the powers of two that divide a rank's samples per step, and all of its samples."""
    per_rank = global_batch // world_size
    return tuple(sorted({size for size in _powers(per_rank) if per_rank % size == 0} | {per_rank}))


def _powers(largest: int) -> list[int]:
    return [1 << exponent for exponent in range(largest.bit_length()) if 1 << exponent <= largest]


def memory_savings(*, offload: bool) -> Iterator[Mapping[str, Any]]:
    """Yield what saves memory besides sharding, the fastest first.

    Args:
        offload: with offload of parameters, which is far slower, instead of without.
    """
    for checkpointing in CHECKPOINTING:
        yield {"checkpointing": checkpointing, "offload_activations": False, "offload_params": offload}
    yield {"checkpointing": "full", "offload_activations": True, "offload_params": offload}
