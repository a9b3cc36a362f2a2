"""The pages of ``hf-fsdp plan --html``: pictures of a plan, or with ``--advise`` of the settings that were compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hf_fsdp_plugin.checkpoint.file_io import write_atomically
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, equal_units
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.strategies import STRATEGIES
from hf_fsdp_plugin.text import format_count, format_memory, plural, printable
from hf_fsdp_plugin.tools.common import format_seconds
from hf_fsdp_plugin.tools.plan.estimate import types
from hf_fsdp_plugin.tools.plan.output import Prediction, subject_of

if TYPE_CHECKING:
    from hf_fsdp_plugin.tools.plan.estimate.planner import Advice, AdviceRow

_COLORS: Final[dict[types.MemoryKind, str]] = {
    "params": "#0072b2", "grads": "#e69f00", "optimizer": "#009e73", "activations": "#cc79a7", "gathered": "#56b4e9",
    "other": "#8c8c8c",
}  # fmt: skip
"""The palette of Okabe and Ito, which color-blind readers can tell apart."""
_WIDTH: Final = 1000
_HEIGHT: Final = 200
"""Units of a picture. Browsers cannot hold coordinates in bytes: they limit them to about 2^25."""
_LEAST_HEIGHT: Final = 2.5
"""Height of a band with few bytes, so that it is visible."""
_MOST_SPANS: Final = 1500


def write_page(out: Path, page: str) -> list[str]:
    """Write a page, and return the line that names its file.

    Raises:
        SpecError: the file cannot be written (FSDP-E835).
    """
    try:
        write_atomically(out, page, preserve=True)
    except OSError as error:
        message = f"cannot write {out}: {error.strerror or error}."
        fix = "Choose a file in a folder that exists and is writable."
        raise SpecError([Problem(code="FSDP-E835", message=message, fix=fix)]) from error
    return [printable(f"written: {out}")]


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
        areas=list(_areas(memory.timeline)),
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
    """Return the macros of the template, which return HTML and escape all texts."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"count": format_count, "seconds": format_seconds, "size": format_memory, "id": id}
    text = files("hf_fsdp_plugin.tools.plan").joinpath("charts.html").read_text(encoding="utf-8")
    names = {"COLORS": _COLORS, "KIND_NAMES": types.KIND_NAMES, "WIDTH": _WIDTH, "HEIGHT": _HEIGHT}
    return environment.from_string(text, names).module


def _areas(moments: Sequence[types.Moment]) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Yield the color and the corners of a stacked area for each kind of memory, in units of the picture."""
    top = max([1, *(moment.bytes for moment in moments)])
    heights = [
        {kind: max(_LEAST_HEIGHT, _HEIGHT * size / top) for kind, size in moment.bytes_by_kind.items() if size}
        for moment in moments
    ]
    scale = _HEIGHT / max([_HEIGHT, *(sum(each.values()) for each in heights)])
    xs = [_WIDTH * index / max(1, len(moments) - 1) for index in range(len(moments))]
    lower = [float(_HEIGHT)] * len(moments)
    for kind in types.MEMORY_KINDS:
        upper = [below - scale * each.get(kind, 0) for below, each in zip(lower, heights, strict=True)]
        if upper != lower:
            yield _COLORS[kind], [*zip(xs, upper, strict=True), *reversed([*zip(xs, lower, strict=True)])]
        lower = upper
