"""The page of a plan: memory by strategy and during a step, streams of a step, and units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from torch import nn

from hf_fsdp_plugin.estimate.charts import COLORS, Chart, html_document, macros, memory_chart, rectangle
from hf_fsdp_plugin.estimate.machines import RANKS_PER_MACHINE, Machine
from hf_fsdp_plugin.estimate.memory.peak import estimate_memory
from hf_fsdp_plugin.estimate.results import KIND_NAMES, MEMORY_KINDS, MemoryEstimate, TimeEstimate
from hf_fsdp_plugin.estimate.schedule import Span
from hf_fsdp_plugin.estimate.time import TimeModel
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, UnitPlan
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_seconds, plural

_LANES: Final = {
    "compute": (2.0, COLORS["optimizer"]),
    "communication": (1.0, COLORS["params"]),
    "all_reduce": (0.0, COLORS["grads"]),
}
"""Stream -> its place from the bottom, and its color."""
_LEGEND: Final = {KIND_NAMES[kind]: COLORS[kind] for kind in MEMORY_KINDS}
_MOST_SPANS: Final = 1500


def plan_page(
    plan: FsdpPlan,
    model: nn.Module,
    workload: Workload,
    memory: MemoryEstimate,
    *,
    subject: str,
    gpu_memory: int | None = None,
    machine: Machine | None = None,
    times: TimeModel | None = None,
) -> str:
    """Return one self-contained HTML page.

    Args:
        subject: the plan and the workload in a sentence.
        gpu_memory: bytes of one device; ``None`` if unknown.
        machine, times: figures of the machine, and counted operations, from which the streams of a step are simulated.
    """
    ranks = machine.ranks_per_machine if machine is not None else RANKS_PER_MACHINE
    time: TimeEstimate | None = None
    streams: Chart | None = None
    if machine is not None and times is not None:
        time, streams = times.estimate(machine), stream_chart(times.timeline(machine).spans)
    body = macros().plan(
        title=f"{plan.model_class} on {plural(plan.world_size, 'rank')}",
        subject=subject,
        memory=memory,
        gpu_memory=gpu_memory,
        legend=_LEGEND,
        strategies=list(memory_by_strategy(plan, model, workload, memory, ranks)),
        timeline=memory_chart(memory.timeline, _LEGEND),
        units=unit_groups(plan.units),
        num_params=max(1, plan.num_params),
        time=time,
        streams=streams,
    )
    return html_document(plan.model_class, str(body))


def stream_chart(spans: Sequence[Span]) -> Chart:
    """Return one lane per stream with a rectangle per span; beyond a limit, only the longest."""
    shapes = []
    for span in sorted(spans, key=lambda span: span.start - span.end)[:_MOST_SPANS]:
        y, color = _LANES[span.stream]
        title = f"{span.what}: {(span.end - span.start) * 1000:.2f} ms"
        shapes.append(rectangle(span.start, y + 0.05, span.end - span.start, 0.9, color, title))
    end = max(span.end for span in spans) or 1.0
    ticks = ("0", format_seconds(end))
    return Chart(title="Streams of a step", shapes=shapes, width=end, height=3, ticks=ticks, legend={}, is_low=True)


class StrategyMemory(NamedTuple):
    """Memory of the plan with another strategy; ``is_planned`` marks the plan itself."""

    name: str
    memory: MemoryEstimate
    is_planned: bool


def memory_by_strategy(
    plan: FsdpPlan, model: nn.Module, workload: Workload, memory: MemoryEstimate, ranks_per_machine: int
) -> list[StrategyMemory]:
    """Return the memory of each strategy that is valid for the config, the largest first.

    Args:
        memory: the predicted memory of the plan.
        ranks_per_machine: the shard size of hybrid strategies, which are shown for several machines.
    """
    rows = [StrategyMemory(_strategy_name(plan), memory, is_planned=True)]
    for other in _other_strategies(plan, model, ranks_per_machine):
        rows.append(StrategyMemory(_strategy_name(other), estimate_memory(other, model, workload), is_planned=False))
    return sorted(rows, key=lambda row: -row.memory.peak.bytes)


def _other_strategies(plan: FsdpPlan, model: nn.Module, ranks_per_machine: int) -> Iterator[FsdpPlan]:
    """Yield the plan with each other strategy that the config allows: FSDP1 has no offload without sharding."""
    spec, world = plan.spec, plan.world_size
    for name, strategy in STRATEGIES.items():
        mesh = replace(spec.mesh, shard="auto", replicate="auto")
        if strategy.hybrid:
            mesh = replace(mesh, shard=ranks_per_machine, replicate=world // ranks_per_machine)
        if name == plan.strategy or (strategy.hybrid and (world <= ranks_per_machine or world % ranks_per_machine)):
            continue
        changed = replace(spec, sharding=replace(spec.sharding, strategy=name), mesh=mesh)
        try:
            yield resolve(changed, model, world_size=world, device_type=plan.device_type)
        except SpecError:
            continue


def _strategy_name(plan: FsdpPlan) -> str:
    """``full_shard``, or with the replicas and the shard size of a hybrid mesh: ``hybrid_shard 2×8``."""
    is_hybrid = STRATEGIES[plan.strategy].hybrid
    return f"{plan.strategy} {plan.mesh.replicate}×{plan.mesh.shard}" if is_hybrid else plan.strategy


class UnitGroup(NamedTuple):
    """Units of one class and size, as ``model.layers.0 to model.layers.31``; ``num_params`` is that of one of them."""

    name: str
    class_name: str
    num_units: int
    num_params: int


def unit_groups(units: Iterable[UnitPlan]) -> list[UnitGroup]:
    """Group equal units. The groups are in the order of their first units."""
    groups: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    for unit in units:
        groups[unit.class_name, unit.num_params].append(unit.name or "(root)")
    return [
        UnitGroup(names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}", class_name, len(names), num_params)
        for (class_name, num_params), names in groups.items()
    ]
