"""The pages of ``hf-fsdp plan --html``: pictures of a plan, or with ``--advise`` of the settings that were compared."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, equal_units
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import plural
from hf_fsdp_plugin.tools.pages import areas, load_macros
from hf_fsdp_plugin.tools.plan.estimate import types
from hf_fsdp_plugin.tools.plan.output import Prediction, subject_of

if TYPE_CHECKING:
    from hf_fsdp_plugin.tools.plan.estimate.planner import Advice, AdviceRow

_MOST_SPANS: Final = 1500


def plan_page(prediction: Prediction) -> str:
    """Return one self-contained HTML page: memory by strategy and during a step, streams of a step, and units.

    The template charts.html draws them as SVG. It has no scripts and no addresses of other files.
    """
    planned, memory, spans = prediction.planned, prediction.memory, []
    plan = planned.plan
    if planned.machine is not None and prediction.times is not None:
        spans = prediction.times.timeline(planned.machine).spans
    body = _macros().plan(
        title=f"{plan.model_class} on {plural(plan.world_size, 'rank')}",
        subject=subject_of(plan, planned.workload),
        memory=memory,
        gpu_memory=planned.gpu_memory,
        planned=_strategy_name(plan),
        strategies=memory_by_strategy(prediction),
        areas=list(areas(memory.timeline)),
        units=equal_units(plan.units),
        num_params=max(1, plan.num_params),
        time=prediction.time,
        spans=sorted(spans, key=lambda span: span.start - span.end)[:_MOST_SPANS],
        step_end=max((span.end for span in spans), default=0.0) or 1.0,
    )
    return str(_macros().document(plan.model_class, str(body)))


def advice_page(
    title: str, answer: str, advice: Advice, chosen: AdviceRow | None, names: Mapping[int, tuple[str, str]], config: str
) -> str:
    """Return one self-contained HTML page of the settings that the planner has compared: their memory and speed.

    Args:
        chosen: the row of the config.
        names: ``id`` of each row that is shown -> its settings, and its micro-batches.
        config: the text of the config; empty if nothing fits.
    """
    fitting, rejected = ([row for row in rows if id(row) in names] for rows in (advice.fitting, advice.rejected))
    body = _macros().advice(
        title=title, answer=answer, advice=advice, fitting=fitting, rejected=rejected, chosen=chosen, names=names,
        fastest=max((row.tokens_per_second or 0.0 for row in fitting), default=0.0), config=config,
        largest=max([advice.gpu_memory, *(row.memory.needed_bytes for row in (*fitting, *rejected))]),
    )  # fmt: skip
    return str(_macros().document(title, str(body)))


def memory_by_strategy(prediction: Prediction) -> dict[str, types.MemoryEstimate]:
    """Return the memory of each strategy that is valid for the config, the largest first.

    Hybrid strategies shard over the ranks of one machine, and are shown for several machines.
    """
    from hf_fsdp_plugin.plan.resolve import resolve
    from hf_fsdp_plugin.tools.plan.estimate.memory.peak import estimate_memory

    planned, plan = prediction.planned, prediction.planned.plan
    ranks = planned.ranks_per_machine
    world, found = plan.world_size, {_strategy_name(plan): prediction.memory}
    if plan.sharded_at_load:  # by the plan of the model, not by a strategy
        return found
    for name, strategy in STRATEGIES.items():
        if name == plan.strategy or (strategy.hybrid and (world <= ranks or world % ranks)):
            continue
        mesh: dict[str, Any] = {"mesh.shard": "auto", "mesh.replicate": "auto"}
        if strategy.hybrid:
            mesh = {"mesh.shard": ranks, "mesh.replicate": world // ranks}
        spec = plan.spec.with_values({"sharding.strategy": name, **mesh}, {})
        try:
            other = resolve(spec, planned.model, world_size=world, device_type=plan.device_type)
        except SpecError:  # FSDP1 has no offload without sharding
            continue
        found[_strategy_name(other)] = estimate_memory(other, planned.model, planned.workload)
    return dict(sorted(found.items(), key=lambda item: -item[1].peak.bytes))


def _strategy_name(plan: FsdpPlan) -> str:
    """``full_shard``, or with the replicas and the shard size of a hybrid mesh: ``hybrid_shard 2×8``."""
    is_hybrid = STRATEGIES[plan.strategy].hybrid
    return f"{plan.strategy} {plan.mesh.replicate}×{plan.mesh.shard}" if is_hybrid else plan.strategy


@cache
def _macros() -> Any:
    return load_macros("plan/charts.html")
