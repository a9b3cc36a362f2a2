"""The pictures of a plan: an HTML page and a PNG with memory by strategy and over time, streams, units, and scaling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from torch import nn

from hf_fsdp_plugin.estimate.charts import (
    COLORS,
    Chart,
    Shape,
    charts_image,
    html_document,
    macros,
    memory_chart,
    rank_chart,
    rectangle,
)
from hf_fsdp_plugin.estimate.memory import estimate_memory
from hf_fsdp_plugin.estimate.results import KIND_NAMES, MEMORY_KINDS, MemoryEstimate, MemoryKind, TimeEstimate
from hf_fsdp_plugin.estimate.schedule import Span
from hf_fsdp_plugin.estimate.time import ScalingRow
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, UnitPlan
from hf_fsdp_plugin.plan.names import ancestors, parent_of
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_bytes, format_count, plural, shorten

RANKS_PER_MACHINE: Final = 8
"""Ranks that a hybrid strategy shards over if no machine is given."""
_LANES: Final = {
    "compute": (2.0, "computation", COLORS["optimizer"]),
    "communication": (1.0, "all-gathers, reduce-scatters", COLORS["params"]),
    "all_reduce": (0.0, "all-reduces", COLORS["grads"]),
}
_LEGEND: Final = {KIND_NAMES[kind]: COLORS[kind] for kind in MEMORY_KINDS}
_MARK: Final = "#c1121f"
_MOST_SPANS: Final = 1500
_MOST_UNITS: Final = 12


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
    """Return what the pictures of a plan show.

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
        memory=memory, gpu_memory=gpu_memory, units=tree_of_units(plan.units), time=time, spans=tuple(spans),
        scaling=tuple(scaling),
    )  # fmt: skip


def plan_page(data: PictureData) -> str:
    """Return one self-contained HTML page: no scripts, no network, light and dark."""
    timeline = memory_chart(data.memory.timeline) if len(data.memory.timeline) > 1 else None
    streams = stream_chart(data.spans) if data.spans else None
    scaling = _scaling_chart(data.scaling) if data.scaling else None
    return html_document(data.title, str(macros().plan(data, _LEGEND, timeline, streams, scaling)))


def plan_image(data: PictureData) -> bytes:
    """Return a PNG with the pictures.

    Raises:
        SpecError: matplotlib is not installed (FSDP-E834).
    """
    largest = sorted(data.units.children, key=lambda node: -node.total)[:_MOST_UNITS]
    units: dict[str, Mapping[MemoryKind, int]] = {
        f"{shorten(node.name, 44)}: {format_count(node.total)}": {"params": node.total} for node in largest
    }
    strategies = {
        f"{row.name}{' (planned)' * row.is_planned}": row.memory.peak.bytes_by_kind for row in data.strategies
    }
    memory = [memory_chart(data.memory.timeline)] if len(data.memory.timeline) > 1 else []
    rows = (
        [
            _bar_chart("Memory per rank by strategy", strategies, "bytes", data.gpu_memory, _LEGEND),
            _bar_chart("Units by number of parameters", units, "parameters"),
        ],
        [*memory, *([_scaling_chart(data.scaling)] if data.scaling else [])],
        [stream_chart(data.spans)] if data.spans else [],
    )
    return charts_image(f"{data.title}\n{data.subtitle}", rows)


def stream_chart(spans: Sequence[Span]) -> Chart:
    """Return one lane per stream with a rectangle per span; beyond a limit, only the longest."""
    shapes = []
    for span in sorted(
        sorted(spans, key=lambda span: span.start - span.end)[:_MOST_SPANS], key=lambda span: span.start
    ):
        y, _, color = _LANES[span.stream]
        title = f"{span.what}: {(span.end - span.start) * 1000:.2f} ms"
        shapes.append(rectangle(span.start, y + 0.05, span.end - span.start, 0.9, color, title))
    end = max(span.end for span in spans) or 1.0
    rows = tuple((y + 0.5, name) for y, name, _ in _LANES.values())
    ticks = tuple((end * part / 4, f"{end * part / 4:.3f} s") for part in range(5))
    return Chart(
        title="Streams of a step", shapes=tuple(shapes), width=end, height=3.0, ticks=ticks, rows=rows, legend={}
    )


def _scaling_chart(rows: Sequence[ScalingRow]) -> Chart:
    lines = {"tokens/s per rank": {row.world_size: row.efficiency for row in rows}}
    return rank_chart(title="Efficiency over the number of ranks", lines=lines, unit="of the first row", rule=1.0)


def _bar_chart(
    title: str,
    bars: Mapping[str, Mapping[MemoryKind, int]],
    unit: str,
    rule: int | None = None,
    legend: Mapping[str, str] | None = None,
) -> Chart:
    """Return horizontal bars of the kinds of memory, the first one at the top."""
    width = 1.05 * max([rule or 0, *(sum(bar.values()) for bar in bars.values())]) or 1.0
    shapes = []
    for at, bar in enumerate(reversed(list(bars.values()))):
        left = 0.0
        for kind in MEMORY_KINDS:
            shapes.append(rectangle(left, at + 0.1, bar.get(kind, 0), 0.8, COLORS[kind]))
            left += bar.get(kind, 0)
    if rule is not None:
        shapes.append(Shape(points=((rule, 0), (rule, len(bars))), color=_MARK, is_line=True))
    text = format_count if unit == "parameters" else partial(format_bytes, binary=True)
    ticks = tuple((width * part / 4, text(int(width * part / 4))) for part in range(5))
    rows = tuple((at + 0.5, name) for at, name in enumerate(reversed(list(bars))))
    return Chart(
        title=title, shapes=tuple(shapes), width=width, height=len(bars), ticks=ticks, rows=rows, legend=legend or {}
    )


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


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitNode:
    """Consecutive equal units, with the units inside each of them.

    Attributes:
        name: the module, relative to the unit around it; ``layers.0 to layers.31`` for several; empty for the root.
        num_units: number of these units in one unit around them.
        num_params: parameters of one of them, without those of the units inside it.
    """

    name: str
    class_name: str
    num_units: int
    num_params: int
    children: tuple[UnitNode, ...] = ()

    @property
    def total(self) -> int:
        """Parameters of all these units, with those of the units inside them."""
        return self.num_units * (self.num_params + sum(child.total for child in self.children))


def tree_of_units(units: Sequence[UnitPlan]) -> UnitNode:
    """Return the root with everything inside it. The units of a node are in the order of the plan."""
    by_module = {name: unit.name for unit in units for name in unit.modules if name}
    inside: defaultdict[str, list[UnitPlan]] = defaultdict(list)
    root = next((unit for unit in units if not unit.name), None)
    for unit in units:
        if unit is not root:
            around = ancestors(parent_of(unit.modules[0]))
            inside[next((by_module[path] for path in around if path in by_module), "")].append(unit)
    num_params, class_name = (root.num_params, root.class_name) if root is not None else (0, "")
    children = tuple(_merged([_node(unit, "", inside) for unit in inside[""]]))
    return UnitNode(name="", class_name=class_name, num_units=1, num_params=num_params, children=children)


def _node(unit: UnitPlan, around: str, inside: dict[str, list[UnitPlan]]) -> UnitNode:
    prefix = f"{around}." if around else ""
    children = _merged([_node(child, unit.modules[0], inside) for child in inside.get(unit.name, [])])
    return UnitNode(
        name=" + ".join(name.removeprefix(prefix) for name in unit.modules), class_name=unit.class_name, num_units=1,
        num_params=unit.num_params, children=tuple(children),
    )  # fmt: skip


def _merged(nodes: Sequence[UnitNode]) -> list[UnitNode]:
    """Return the nodes with equal neighbors as one."""
    found: list[UnitNode] = []
    first = ""
    for node in nodes:
        last = found[-1] if found else None
        if last is not None and _kind(last) == _kind(node):
            found[-1] = replace(last, name=f"{first} to {node.name}", num_units=last.num_units + 1)
            continue
        first = node.name
        found.append(node)
    return found


def _kind(node: UnitNode) -> tuple[object, ...]:
    return node.class_name, node.num_params, node.children
