"""Builds the report: reads the sharded model on every rank, and compares it with the plan."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.axes import MODEL_AXES
from hf_fsdp_plugin.backends.ranks.agreement import gather_equal_objects, gather_objects, on_all_ranks
from hf_fsdp_plugin.backends.sharding.shard import plan_of
from hf_fsdp_plugin.contracts import off_warning, off_without
from hf_fsdp_plugin.observe import run_checks, weights
from hf_fsdp_plugin.observe import units as live_units
from hf_fsdp_plugin.observe.first_step import FirstStep, added_parameters, recorded_first_step
from hf_fsdp_plugin.observe.observed_run import JsonObject, ObservedRun, check_settings
from hf_fsdp_plugin.observe.report import BatchShape, MemoryRow, Report, ReportRow
from hf_fsdp_plugin.observe.setting_readers import observe_settings
from hf_fsdp_plugin.observe.unit_readers import axis_size
from hf_fsdp_plugin.observe.weights import optimizers_of, unwrapped_optimizer
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.problems import Problem, SpecError

_PACKAGES = ("torch", "transformers", "accelerate")


def build_report(
    model: nn.Module,
    plan: FsdpPlan,
    *,
    optimizers: Sequence[Any] = (),
    batch: BatchShape | None = None,
    state_dict: str | None = None,
    state_dict_reason: str = "",
    saved_asynchronously: bool | None = None,
) -> Report:
    """Read the live model and compare it with the plan. Collective: every rank of the process group must call it.

    Args:
        model: the sharded model that the backend returned.
        optimizers: the optimizers of this model: torch optimizers, or Accelerate's wrappers of them.
        batch: the input of one optimizer step on one rank.
        state_dict: the state dict type of the last checkpoint or, if there is none, of the next one: ``full``,
            ``sharded`` or ``local``.
        state_dict_reason: why it is another one than the requested type; empty if it should not be.
        saved_asynchronously: whether the last checkpoint was written asynchronously; ``None`` if there is none.

    Raises:
        SpecError: the model cannot be read on some rank. All ranks raise it, and the message names the rank.
    """
    with on_all_ranks("reading the live model"):
        facts = _read_rank(model, optimizers, batch)
    ranks = gather_objects(facts.row)
    shared = gather_equal_objects(facts.shared)
    training = _training_of_ranks(facts, [each.unchanged for each in shared])
    device_type, units = facts.row["device"].partition(":")[0], facts.units
    replicated = any(unit.live.known("replicate_size", 1) > 1 for unit in units)
    compared = None
    if plan.ram_efficient or plan.sync_module_states or replicated:
        compared = off_without(None)(weights.compare_weights)(model, units)
    with on_all_ranks("comparing the live model with the plan"):
        structure = (
            live_units.StructureComparison() if plan.pre_sharded else live_units.compare_structure(model, units, plan)
        )
        run = ObservedRun(
            model=model,
            plan=plan,
            units=units,
            world_size=len(ranks),
            device_type=device_type,
            rank=facts.row["rank"],
            structure=replace(structure, added=tuple(added_parameters(model))),
            num_hosts=len({row["host"] for row in ranks}),
            first_step=facts.first_step,
            state_dict=state_dict,
            state_dict_reason=state_dict_reason,
            saved_asynchronously=saved_asynchronously,
            weights=compared,
        )
        settings, problems = observe_settings(run), _check_run(run, facts, training, shared)
    settings, problems = _merge_ranks(settings, problems)
    mesh = _mesh_of(run)
    batch, of_batch = run_checks.batch_of_ranks([each.batches for each in shared], mesh["replicate"] * mesh["shard"])
    unsharded = "ddp" if isinstance(model, nn.parallel.DistributedDataParallel) else "none"
    return Report(
        backend=" and ".join(f"fsdp{number}" for number in sorted({unit.live.version for unit in units})) or unsharded,
        model_class=plan.model_class,
        world_size=len(ranks),
        mesh=mesh,
        device=device_type,
        units=units,
        num_params=sum(unit.num_params for unit in units) + facts.num_unmanaged,
        settings=tuple(map(ReportRow, settings)),
        memory=MemoryRow(facts.memory),
        ranks=tuple(map(MemoryRow, ranks)),
        problems=(*plan.problems, *check_settings(settings, plan), *problems, *of_batch),
        batch=batch,
        training=ReportRow(training),
        versions={name: version(name) for name in _PACKAGES},
    )


@dataclass(frozen=True, slots=True)
class _SharedFacts:
    """What all ranks need of each rank. Equal on most of them.

    Attributes:
        unchanged: keys of the shards that no step has changed; ``None`` if this is unknown.
        options: of optimizers, see ``FirstStep``.
        batches: the input of a step that the arguments give, and the observed one.
    """

    unchanged: frozenset[tuple[int, int]] | None
    options: Mapping[tuple[int, str, str], Any]
    batches: tuple[BatchShape | None, BatchShape | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankFacts:
    """What a rank reads off its live model.

    Attributes:
        optimizers: torch's optimizers, without those that wrap them.
        names: key of a shard -> its name.
        num_unmanaged: elements of the parameters in no unit.
        row: the rank's row in the report.
    """

    first_step: FirstStep
    units: tuple[live_units.UnitObservation, ...]
    optimizers: Sequence[torch.optim.Optimizer]
    names: Mapping[tuple[int, int], str]
    num_unmanaged: int
    memory: JsonObject
    row: JsonObject
    shared: _SharedFacts


def _read_rank(model: nn.Module, optimizers: Sequence[Any], batch: BatchShape | None) -> _RankFacts:
    inner = [found for optimizer in optimizers if (found := unwrapped_optimizer(optimizer)) is not None]
    first_step, units = recorded_first_step(model), live_units.observe_units(model)
    unchanged = weights.unchanged_parameters(first_step.shard_hashes, first_step.later_hashes, units)
    memory = live_units.observe_memory(model, units, inner, first_step.grads_bytes)
    num_unmanaged = sum(parameter.numel() for parameter in live_units.unmanaged_parameters(model, units))
    # The parts of this rank that are trained: a rank may have none.
    trained = {key for key, value in (first_step.shard_hashes or {}).items() if value is not None}
    # The units compute on this device; offloaded shards are on another one.
    devices = [device for unit in units if (device := unit.live.known("device")) is not None]
    devices += [parameter.device for parameter in model.parameters()]
    row = {
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "host": socket.gethostname(),
        "device": str(next(iter(devices), "cpu")),
        "num_local_params": sum(unit.num_local_params for unit in units) + num_unmanaged,
        "weights_changed": bool(trained - unchanged) if trained and unchanged is not None else None,
        **memory,
    }
    batches = batch, run_checks.observed_batch(batch, first_step)
    return _RankFacts(
        first_step=first_step,
        units=units,
        optimizers=inner,
        names=weights.names_of_parts(model, units),
        num_unmanaged=num_unmanaged,
        memory=memory,
        row=row,
        shared=_SharedFacts(unchanged, first_step.options, batches),
    )


def _training_of_ranks(facts: _RankFacts, unchanged: Sequence[frozenset[tuple[int, int]] | None]) -> JsonObject:
    """Return what the steps have changed, on all ranks."""
    known = [found for found in unchanged if found is not None]
    untouched, hashes = frozenset.intersection(*known) if known else frozenset(), facts.first_step.shard_hashes or {}
    return {
        "steps": facts.first_step.num_steps,
        "examined_steps": len(facts.first_step.later_hashes),
        "trained_parameters": len(hashes) if known else None,
        "changed_parameters": len(hashes) - len(untouched) if known else None,
        "unchanged_parameters": sorted(facts.names[key] for key in untouched),
    }


def _check_run(
    run: ObservedRun, facts: _RankFacts, training: JsonObject, shared: Sequence[_SharedFacts]
) -> list[Problem]:
    """Return the problems that this rank finds, but those of settings and batches."""
    first_step, model, units = facts.first_step, run.model, run.units
    unknown = {error.reason: error for unit in units for error in unit.live.unknown()}
    return [
        *map(off_warning, unknown.values()),
        *run_checks.check_structure(units, run.plan, trained=model.training or first_step.num_steps > 0),
        *weights.check_optimizers(model, units, facts.optimizers, prepared_ids=first_step.optimized_ids),
        *run_checks.check_training(run, training, prepared=bool(facts.optimizers)),
        *run_checks.check_options([each.options for each in shared]),
    ]


def _mesh_of(run: ObservedRun) -> dict[str, int]:
    """Return the sizes of the axes of the live model's meshes."""
    sharded = next((unit.live for unit in run.units if unit.num_params), None)
    if sharded is None:
        return {"replicate": run.world_size, "shard": 1}
    # 0 is a size that the installed torch does not show.
    others = {axis: size for axis in MODEL_AXES if (size := axis_size(run, axis)) > 1}
    shard = sharded.known("shard_size", 0) // others.get("context", 1)
    return {"replicate": sharded.known("replicate_size", 0), "shard": shard} | others


def build_report_of_trained(models: Sequence[Any], optimizers: Sequence[Any] = (), **facts: Any) -> Report:
    """Build the report of the first prepared model that one of the optimizers updates. Collective.

    It contains the reports of the other prepared models.

    Args:
        facts: ``batch``, ``saved_asynchronously`` and those of ``state_dict`` of :func:`build_report`.

    Raises:
        SpecError: the plugin prepared none of the models.
    """
    plans = {model: plan for model in models if (plan := _find_plan(model)) is not None}
    if not plans:
        names = ", ".join(type(model).__name__ for model in models) or "it has no model"
        message = f"report() found no model that hf_fsdp_plugin prepared ({names})."
        fix = "Call install() before the Accelerator or Trainer is created, and report() after prepare()."
        raise SpecError([Problem(code="FSDP-E508", message=message, fix=fix)])
    owned = {model: optimizers_of(model, optimizers) for model in plans}
    # If no optimizer updates any of the models, the report of the first one contains the problem.
    model = next((model for model in plans if owned[model]), next(iter(plans)))
    report = build_report(model, plans[model], optimizers=owned[model] or optimizers, **facts)
    del plans[model]
    others = [
        build_report(other, plan, optimizers=owned[other], state_dict=facts.get("state_dict"))
        for other, plan in plans.items()
    ]
    return replace(report, other_models=tuple(others))


def _find_plan(model: Any) -> FsdpPlan | None:
    """Return the plan of a model or, if the model is compiled or wrapped, the plan of the prepared model inside it."""
    if not isinstance(model, nn.Module):
        message = f"report() takes a prepared model, an Accelerator or a Trainer, not {type(model).__name__}."
        raise SpecError([Problem(code="FSDP-E507", message=message)])
    return next((plan for module in model.modules() if (plan := plan_of(module)) is not None), None)


def _merge_ranks(settings: Sequence[JsonObject], problems: list[Problem]) -> tuple[list[JsonObject], list[Problem]]:
    """Return the same settings and problems on all ranks. Collective.

    A setting differs if it differs on any rank. A problem that only some ranks have names the first of them.
    """
    results = gather_equal_objects((settings, problems))
    rows = [
        next((row for row in of_ranks if row["status"] == "differs"), of_ranks[0])
        for of_ranks in zip(*(found for found, _ in results), strict=True)
    ]
    ranks_with: dict[Problem, list[int]] = {}
    for rank, (_, found) in enumerate(results):
        for problem in dict.fromkeys(found):
            ranks_with.setdefault(problem, []).append(rank)
    merged: dict[tuple[str, str], Problem] = {}
    for problem, ranks in ranks_with.items():
        shown = problem if len(ranks) == len(results) else replace(problem, rank=ranks[0])
        merged.setdefault((problem.code, problem.message), shown)
    return rows, list(merged.values())
