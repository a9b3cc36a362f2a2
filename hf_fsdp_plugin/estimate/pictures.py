"""The page of a plan: memory by strategy and during a step, streams of a step, and units.

The template charts.html draws them as SVG. It has no scripts and no addresses of other files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any, Final

from torch import nn

from hf_fsdp_plugin.estimate.machines import RANKS_PER_MACHINE, Machine
from hf_fsdp_plugin.estimate.memory.peak import estimate_memory
from hf_fsdp_plugin.estimate.results import KIND_NAMES, MEMORY_KINDS, MemoryEstimate, MemoryKind, Moment
from hf_fsdp_plugin.estimate.time import TimeModel
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, equal_units
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_count, format_memory, format_seconds, plural

_COLORS: Final[dict[MemoryKind, str]] = {
    "params": "#0072b2", "grads": "#e69f00", "optimizer": "#009e73", "activations": "#cc79a7", "gathered": "#56b4e9",
    "other": "#8c8c8c",
}  # fmt: skip
"""The palette of Okabe and Ito, which color-blind readers can tell apart."""
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
    time, spans = None, []
    if machine is not None and times is not None:
        time, spans = times.estimate(machine), times.timeline(machine).spans
    body = _macros().plan(
        title=f"{plan.model_class} on {plural(plan.world_size, 'rank')}",
        subject=subject,
        memory=memory,
        gpu_memory=gpu_memory,
        planned=_strategy_name(plan),
        strategies=memory_by_strategy(plan, model, workload, memory, ranks),
        areas=list(_areas(memory.timeline)),
        units=equal_units(plan.units),
        num_params=max(1, plan.num_params),
        time=time,
        spans=sorted(spans, key=lambda span: span.start - span.end)[:_MOST_SPANS],
        step_end=max((span.end for span in spans), default=0.0) or 1.0,
    )
    return str(_macros().document(plan.model_class, str(body)))


@cache
def _macros() -> Any:
    """Return the macros of the template, which return HTML and escape all texts."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"count": format_count, "seconds": format_seconds, "size": format_memory}
    text = files("hf_fsdp_plugin.estimate").joinpath("charts.html").read_text(encoding="utf-8")
    return environment.from_string(text, {"COLORS": _COLORS, "KIND_NAMES": KIND_NAMES}).module


def _areas(moments: Sequence[Moment]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield the color and the corners of a stacked area for each kind of memory: index of the moment, and bytes."""
    lower = [0] * len(moments)
    for kind in MEMORY_KINDS:
        upper = [below + moment.bytes_by_kind.get(kind, 0) for below, moment in zip(lower, moments, strict=True)]
        yield _COLORS[kind], [*enumerate(upper), *reversed(list(enumerate(lower)))]
        lower = upper


def memory_by_strategy(
    plan: FsdpPlan, model: nn.Module, workload: Workload, memory: MemoryEstimate, ranks_per_machine: int
) -> dict[str, MemoryEstimate]:
    """Return the memory of each strategy that is valid for the config, the largest first.

    Args:
        memory: the predicted memory of the plan.
        ranks_per_machine: the shard size of hybrid strategies, which are shown for several machines.
    """
    found = {_strategy_name(plan): memory}
    spec, world = plan.spec, plan.world_size
    for name, strategy in STRATEGIES.items():
        mesh = replace(spec.mesh, shard="auto", replicate="auto")
        if strategy.hybrid:
            mesh = replace(mesh, shard=ranks_per_machine, replicate=world // ranks_per_machine)
        if name == plan.strategy or (strategy.hybrid and (world <= ranks_per_machine or world % ranks_per_machine)):
            continue
        changed = replace(spec, sharding=replace(spec.sharding, strategy=name), mesh=mesh)
        try:
            other = resolve(changed, model, world_size=world, device_type=plan.device_type)
        except SpecError:  # FSDP1 has no offload without sharding
            continue
        found[_strategy_name(other)] = estimate_memory(other, model, workload)
    return dict(sorted(found.items(), key=lambda item: -item[1].peak.bytes))


def _strategy_name(plan: FsdpPlan) -> str:
    """``full_shard``, or with the replicas and the shard size of a hybrid mesh: ``hybrid_shard 2×8``."""
    is_hybrid = STRATEGIES[plan.strategy].hybrid
    return f"{plan.strategy} {plan.mesh.replicate}×{plan.mesh.shard}" if is_hybrid else plan.strategy
