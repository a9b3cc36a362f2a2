"""What the planner compares and returns: choices of settings, what each needs, their order and its reasons.

The best row is compared with the rule of thumb that guides print: a strategy by the number of parameters alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final

from hf_fsdp_plugin.estimate.results import KIND_NAMES, MEMORY_KINDS, MemoryEstimate, TimeEstimate
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.spec.fsdp_spec import Checkpointing, Version
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_count, format_memory

SAME_SPEED: Final = 0.05
"""Difference of predicted times, as a part of the time, that is within the error of the prediction.

It is the median error of the predicted times of steps in docs/results.md.
"""
_SAME_MEMORY: Final = 0.02
"""Difference of peaks, as a part of the memory that a row may need, below which the simpler mesh is preferred."""
_TREE: Final = (
    (3 * 10**9, "no_shard", False),
    (13 * 10**9, "shard_grad_op", False),
    (70 * 10**9, "full_shard", False),
    (inf, "full_shard", True),
)
"""Largest number of parameters, strategy, and whether parameters are offloaded."""
_ROUNDED: Final = 1.03
"""A model is named by its rounded size: Llama 70B has 70.6 billion parameters."""


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
    """

    sharding: Sharding
    checkpointing: Checkpointing = "none"
    offload_activations: bool = False
    offload_params: bool = False
    micro_batch: int = 1
    accumulation: int = 1
    sync_each_batch: bool = False

    def settings(self, version: Version) -> dict[str, Any]:
        """Return the FSDP settings by canonical name, as the spec has them."""
        sharding = self.sharding
        is_hybrid = STRATEGIES[sharding.strategy].hybrid
        mesh = {"mesh.shard": sharding.shard, "mesh.replicate": sharding.replicate} if is_hybrid else {}
        return {
            "fsdp.version": version,
            "sharding.strategy": sharding.strategy,
            **mesh,
            "activation.checkpointing": self.checkpointing,
            "activation.offload": self.offload_activations,
            "offload.params": self.offload_params,
        }


def shardings(num_machines: int, gpus_per_machine: int) -> Iterator[Sharding]:
    """Yield the strategies, hybrid ones for each shard size that divides a machine or is a number of machines."""
    world = num_machines * gpus_per_machine
    inside = {size for size in _powers(gpus_per_machine) if gpus_per_machine % size == 0} | {gpus_per_machine}
    across = {count * gpus_per_machine for count in _powers(num_machines) if num_machines % count == 0}
    for row in STRATEGIES.values():
        sizes = [world if row.is_sharded else 1]
        if row.hybrid:
            sizes = sorted(size for size in inside | across if 1 < size < world)
        for shard in sizes:
            yield Sharding(strategy=row.name, shard=shard, replicate=world // shard)


def micro_batches(samples: int) -> tuple[int, ...]:
    """Return the powers of two that divide a rank's samples per step, and all of its samples."""
    return tuple(sorted({size for size in _powers(samples) if samples % size == 0} | {samples}))


def _powers(largest: int) -> list[int]:
    return [1 << exponent for exponent in range(largest.bit_length())]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdviceRow:
    """One combination of settings and what it needs.

    Attributes:
        settings: FSDP settings by canonical name.
        plan, workload: what the figures are for.
        fits: whether the needed memory is within the device's memory without headroom.
        time: ``None`` without a machine, and for rows that do not fit.
        communicated: bytes of all collectives of a rank per optimizer step.
        reason: why the row is not the best one, in one line; empty for the best one.
    """

    choice: Choice
    settings: Mapping[str, Any]
    plan: FsdpPlan
    workload: Workload
    fits: bool
    memory: MemoryEstimate
    time: TimeEstimate | None
    communicated: int
    reason: str

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak.bytes

    @property
    def needed_bytes(self) -> int:
        """Memory of a device that the step needs: torch's allocator, context and NCCL."""
        return self.memory.needed_bytes

    @property
    def tokens_per_second(self) -> float | None:
        return self.time.tokens_per_second if self.time is not None else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """The planner's answer.

    Attributes:
        rows: those that fit, the best first (see :func:`in_order`), then one for each combination that does not fit.
        limit: bytes of a device without headroom.
        remedies: what would fit, one sentence each, if nothing does.
    """

    rows: tuple[AdviceRow, ...]
    gpu_memory: int
    limit: int
    remedies: tuple[str, ...] = ()

    @property
    def fitting(self) -> tuple[AdviceRow, ...]:
        return tuple(row for row in self.rows if row.fits)

    @property
    def rejected(self) -> tuple[AdviceRow, ...]:
        return tuple(row for row in self.rows if not row.fits)

    @property
    def best(self) -> AdviceRow | None:
        """The first row that fits; ``None`` if nothing fits."""
        return self.rows[0] if self.rows and self.rows[0].fits else None


def rejection_reason(memory: MemoryEstimate, limit: int) -> str:
    """Return why an estimate does not fit, in one line."""
    peak = memory.peak
    kind = max(MEMORY_KINDS, key=lambda kind: peak.bytes_by_kind[kind])
    name = "other memory" if kind == "other" else KIND_NAMES[kind]
    size = format_memory(peak.bytes_by_kind[kind])
    needed, available = format_memory(memory.needed_bytes), format_memory(limit)
    return f"needs {needed} of {available}, {size} of it {name}, in the {peak.where}"


def row_cost(row: AdviceRow) -> tuple[float, ...]:
    """Return the order of rows that fit: by predicted speed, else by the work that is known to cost time."""
    choice = row.choice
    return (-(row.tokens_per_second or 0.0), *_extra_work(choice), row.communicated, choice.accumulation)


def in_order(fitting: Sequence[AdviceRow], limit: int) -> list[AdviceRow]:
    """Return the rows that fit, the best first.

    The fastest rows whose predicted times are equal within the error of the prediction are ordered by what is known to
    cost time, then by memory, then by the complexity of the mesh. All others are ordered by :func:`row_cost`.

    Args:
        limit: bytes that a row may need.
    """
    rows = sorted(fitting, key=row_cost)
    fastest = rows[0].tokens_per_second if rows else None
    if not fastest:
        return rows
    tied = [row for row in rows if (row.tokens_per_second or 0.0) >= fastest * (1 - SAME_SPEED)]
    simplest = sorted(tied, key=lambda row: (*_extra_work(row.choice), *_complexity(row, limit), row_cost(row)))
    return [*simplest, *rows[len(tied) :]]


def _extra_work(choice: Choice) -> tuple[int, ...]:
    """Return how much a choice copies and recomputes."""
    slower = ("none", "selective", "full").index(choice.checkpointing)
    return (int(choice.offload_params), int(choice.offload_activations), slower)


def _complexity(row: AdviceRow, limit: int) -> tuple[int, ...]:
    """Return the order of rows that are equally fast: memory in steps of :data:`_SAME_MEMORY`, then mesh."""
    choice = row.choice
    is_hybrid = choice.sharding.replicate > 1 and choice.sharding.shard > 1
    memory = int(row.needed_bytes / (limit * _SAME_MEMORY)) if limit else row.needed_bytes
    return (memory, int(is_hybrid), int(choice.sync_each_batch))


def with_reasons(fitting: list[AdviceRow]) -> Iterator[AdviceRow]:
    for number, row in enumerate(fitting):
        best = fitting[0]
        if number == 0:
            yield row
        elif row.tokens_per_second and best.tokens_per_second:
            slower = 1 - row.tokens_per_second / best.tokens_per_second
            yield replace(row, reason=f"{slower:.0%} slower" if slower > SAME_SPEED else _second_choice(row, best))
        else:
            yield replace(row, reason=_difference(row, best))


def _second_choice(row: AdviceRow, best: AdviceRow) -> str:
    """Return why a row is ranked below the best one, although it is as fast within the error of the prediction."""
    if _extra_work(row.choice) > _extra_work(best.choice):
        return f"as fast although it {_difference(row, best)}"
    more = row.needed_bytes - best.needed_bytes
    return f"as fast with {format_memory(more)} more memory" if more > 0 else "as fast"


def _difference(row: AdviceRow, best: AdviceRow) -> str:
    """Return why a row is ranked below the best one without predicted times."""
    if row.choice.offload_params and not best.choice.offload_params:
        return "copies parameters between CPU and device"
    if row.choice.checkpointing != best.choice.checkpointing:
        return "recomputes activations"
    if row.choice.offload_activations and not best.choice.offload_activations:
        return "copies activations between CPU and device"
    more = row.communicated - best.communicated
    if more > 0:
        return f"communicates {format_memory(more)} more per step"
    return f"{row.choice.accumulation} smaller micro-batches per step"


def tree_choice(num_params: int) -> tuple[str, bool]:
    """Return strategy and offload: DDP up to 3 B parameters, ZeRO-2 to 13 B, ZeRO-3 to 70 B, then with offload."""
    return next((strategy, offload) for largest, strategy, offload in _TREE if num_params <= largest * _ROUNDED)


def compare_with_tree(advice: Advice, num_params: int) -> str:
    """Return whether the best row is the one of the decision tree, and if not, why."""
    strategy, offload = tree_choice(num_params)
    name = f"{strategy} with offload of parameters" if offload else strategy
    rule = f"The usual decision tree by size alone ({format_count(num_params)} parameters) gives {name}"
    best = advice.best
    if best is None:
        return f"{rule}, which does not fit either."
    if (best.choice.sharding.strategy, best.choice.offload_params) == (strategy, offload):
        return f"{rule}, as the planner does."
    if offload:
        return f"{rule}. It fits without offload here, which would copy all parameters over the host link in each pass."
    of_tree = next(row for row in advice.rows if row.choice.sharding.strategy == strategy)
    if not of_tree.fits:
        return f"{rule}. It does not fit: it {of_tree.reason}."
    reason = f"it {'is ' if of_tree.tokens_per_second else ''}{of_tree.reason}"
    return f"{rule}. It fits with {format_memory(of_tree.needed_bytes)}, but {reason}."
