"""What the pictures of a plan show: memory by strategy and over time, streams, units, and scaling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch import nn

from hf_fsdp_plugin.estimate.memory import estimate_memory
from hf_fsdp_plugin.estimate.pictures.unit_tree import UnitNode, unit_tree
from hf_fsdp_plugin.estimate.results import MemoryEstimate, MemoryKind, TimeEstimate
from hf_fsdp_plugin.estimate.schedule import Span
from hf_fsdp_plugin.estimate.time import ScalingRow
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_count, plural

KIND_NAMES: Final[dict[MemoryKind, str]] = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "gathered": "gathered units",
    "other": "other",
}
COLORS: Final[dict[MemoryKind, str]] = {
    "params": "#0072b2",
    "grads": "#e69f00",
    "optimizer": "#009e73",
    "activations": "#cc79a7",
    "gathered": "#56b4e9",
    "other": "#8c8c8c",
}
"""The palette of Okabe and Ito, which color-blind readers can tell apart."""
RANKS_PER_MACHINE: Final = 8
"""Ranks that a hybrid strategy shards over if no machine is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyMemory:
    """Memory of the plan with another strategy; ``is_planned`` marks the plan itself."""

    name: str
    memory: MemoryEstimate
    is_planned: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureData:
    """Everything that a picture shows.

    Attributes:
        gpu_memory: bytes of one device; ``None`` if unknown.
        time, spans, scaling: empty without a machine.
    """

    title: str
    subtitle: str
    strategies: tuple[StrategyMemory, ...]
    memory: MemoryEstimate
    gpu_memory: int | None
    units: UnitNode
    time: TimeEstimate | None = None
    spans: tuple[Span, ...] = ()
    scaling: tuple[ScalingRow, ...] = ()


def picture_data(
    plan: FsdpPlan,
    model: nn.Module,
    workload: Workload,
    memory: MemoryEstimate,
    gpu_memory: int | None,
    time: TimeEstimate | None = None,
    spans: Sequence[Span] = (),
    scaling: Sequence[ScalingRow] = (),
    ranks_per_machine: int = RANKS_PER_MACHINE,
) -> PictureData:
    """Return what the pictures of a plan show. The memory of other strategies is that of the closed form.

    Args:
        ranks_per_machine: the shard size of hybrid strategies, which are shown for several machines.
    """
    title = f"{plan.model_class} on {plural(plan.world_size, 'rank')}"
    precision = plan.precision.param if plan.precision.param != "unchanged" else "the model's dtype"
    subtitle = (
        f"{format_count(plan.num_params)} parameters, {plan.backend.upper()} {plan.strategy}, {precision}, micro-batch "
        f"{workload.micro_batch} × {workload.seq_len:,} tokens, {workload.optimizer}"
    )
    return PictureData(
        title=title, subtitle=subtitle, strategies=_strategies(plan, model, workload, memory, ranks_per_machine),
        memory=memory, gpu_memory=gpu_memory, units=unit_tree(plan.units), time=time, spans=tuple(spans),
        scaling=tuple(scaling),
    )  # fmt: skip


def _strategies(
    plan: FsdpPlan, model: nn.Module, workload: Workload, memory: MemoryEstimate, ranks_per_machine: int
) -> tuple[StrategyMemory, ...]:
    rows = [StrategyMemory(name=_strategy_name(plan), memory=memory, is_planned=True)]
    for name, strategy in STRATEGIES.items():
        shard = ranks_per_machine if strategy.hybrid else None
        if name == plan.strategy or (shard is not None and (plan.world_size <= shard or plan.world_size % shard)):
            continue
        if (other := _with_strategy(plan, model, name, shard)) is not None:
            found = estimate_memory(other, model, workload)
            rows.append(StrategyMemory(name=_strategy_name(other), memory=found, is_planned=False))
    return tuple(sorted(rows, key=lambda row: -row.memory.peak.bytes))


def _strategy_name(plan: FsdpPlan) -> str:
    """``full_shard``, or with the replicas and the shard size of a hybrid mesh: ``hybrid_shard 2×8``."""
    is_hybrid = STRATEGIES[plan.strategy].hybrid
    return f"{plan.strategy} {plan.mesh.replicate}×{plan.mesh.shard}" if is_hybrid else plan.strategy


def _with_strategy(plan: FsdpPlan, model: nn.Module, name: str, shard: int | None) -> FsdpPlan | None:
    spec = plan.spec
    mesh = replace(spec.mesh, shard=shard or "auto", replicate=plan.world_size // shard if shard else "auto")
    changed = replace(spec, sharding=replace(spec.sharding, strategy=name), mesh=mesh)
    try:
        return resolve(changed, model, world_size=plan.world_size, device_type=plan.device_type)
    except SpecError:
        return None  # for example offload without sharding under FSDP1
