"""Builds the report: reads the sharded model on every rank, compares it with the plan, and checks its training."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.axes import MODEL_AXES
from hf_fsdp_plugin.backends.ranks.agreement import gather_objects, on_all_ranks
from hf_fsdp_plugin.backends.sharding.shard import plan_of
from hf_fsdp_plugin.contracts import off_warning, off_without
from hf_fsdp_plugin.observe import weights
from hf_fsdp_plugin.observe.first_step import FirstStep, added_parameters, recorded_first_step
from hf_fsdp_plugin.observe.observed_run import JsonObject, ObservedRun, check_settings
from hf_fsdp_plugin.observe.report import BatchShape, MemoryRow, Report, ReportRow
from hf_fsdp_plugin.observe.run_setting_readers import observe_settings
from hf_fsdp_plugin.observe.unit_setting_readers import axis_size
from hf_fsdp_plugin.observe.units import (
    StructureComparison,
    UnitObservation,
    compare_structure,
    observe_memory,
    observe_units,
    unmanaged_parameters,
)
from hf_fsdp_plugin.observe.weights import optimizers_of, unwrapped_optimizer
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_names, plural

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
    storage: str | None = None,
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
        storage: URL of the storage of the checkpoints; ``None`` if no checkpoint was saved to one.

    Raises:
        SpecError: the model cannot be read on some rank. All ranks raise it, and the message names the rank.
    """
    with on_all_ranks("reading the live model"):
        inner = [found for optimizer in optimizers if (found := unwrapped_optimizer(optimizer)) is not None]
        first_step, units = recorded_first_step(model), observe_units(model)
        unchanged = weights.unchanged_parameters(first_step.shard_hashes, first_step.later_hashes, units)
        num_unmanaged = sum(parameter.numel() for parameter in unmanaged_parameters(model, units))
        memory = observe_memory(model, units, inner, first_step.grads_bytes)
        row = {**_rank_row(model, units, num_unmanaged), "weights_changed": _changed(first_step, unchanged), **memory}
    ranks = gather_objects(row)
    observed = observed_batch(batch, first_step)
    length = observed_length(observed, first_step)
    of_ranks = gather_objects((unchanged, first_step.options, (batch, observed), length))
    training = _training_of_ranks(first_step, [found for found, *_ in of_ranks if found is not None])
    device_type = row["device"].partition(":")[0]
    replicated = any(unit.live.known("replicate_size", 1) > 1 for unit in units)
    compared = None
    if plan.ram_efficient or plan.sync_module_states or replicated:
        compared = off_without(None)(weights.compare_weights)(model, units)
    with on_all_ranks("comparing the live model with the plan"):
        structure = StructureComparison() if plan.pre_sharded else compare_structure(model, units, plan)
        run = ObservedRun(
            model=model,
            plan=plan,
            units=units,
            world_size=len(ranks),
            device_type=device_type,
            rank=row["rank"],
            structure=replace(structure, added=tuple(added_parameters(model))),
            num_hosts=len({row["host"] for row in ranks}),
            first_step=first_step,
            state_dict=state_dict,
            state_dict_reason=state_dict_reason,
            saved_asynchronously=saved_asynchronously,
            storage=storage,
            weights=compared,
        )
        unknown = {error.reason: error for unit in units for error in unit.live.unknown()}
        settings = observe_settings(run)
        problems = [
            *map(off_warning, unknown.values()),
            *check_structure(units, plan, trained=model.training or first_step.num_steps > 0),
            *weights.check_optimizers(model, units, inner, prepared_ids=first_step.optimized_ids),
            *check_training(run, training, prepared=bool(inner)),
            *check_options([options for _, options, *_ in of_ranks]),
        ]
    settings, problems = _merge_ranks(settings, problems)
    mesh = _mesh_of(run)
    batch, of_batch = batch_of_ranks([batches for _, _, batches, _ in of_ranks], mesh["replicate"] * mesh["shard"])
    lengths = {length for *_, length in of_ranks}
    if batch is not None and batch.seq_len is None and len(lengths) == 1:
        batch = replace(batch, seq_len=lengths.pop())
    unsharded = "ddp" if isinstance(model, nn.parallel.DistributedDataParallel) else "none"
    return Report(
        backend=" and ".join(f"fsdp{number}" for number in sorted({unit.live.version for unit in units})) or unsharded,
        model_class=plan.model_class,
        world_size=len(ranks),
        mesh=mesh,
        device=device_type,
        units=units,
        num_params=sum(unit.num_params for unit in units) + num_unmanaged,
        settings=tuple(map(ReportRow, settings)),
        memory=MemoryRow(memory),
        ranks=tuple(map(MemoryRow, ranks)),
        problems=(*plan.problems, *check_settings(settings, plan), *problems, *of_batch),
        batch=batch,
        training=ReportRow(training),
        versions={name: version(name) for name in _PACKAGES},
    )


def _rank_row(model: nn.Module, units: Sequence[UnitObservation], num_unmanaged: int) -> dict[str, Any]:
    """Return what identifies this rank in the report, and the number of its parameters."""
    # The units compute on this device; offloaded shards are on another one.
    devices = [device for unit in units if (device := unit.live.known("device")) is not None]
    devices += [parameter.device for parameter in model.parameters()]
    return {
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "host": socket.gethostname(),
        "device": str(next(iter(devices), "cpu")),
        "num_local_params": sum(unit.num_local_params for unit in units) + num_unmanaged,
    }


def _changed(first_step: FirstStep, unchanged: frozenset[str] | None) -> bool | None:
    """Return whether the steps changed this rank's shards; ``None`` if it has none that are trained."""
    trained = {name for name, value in (first_step.shard_hashes or {}).items() if value is not None}
    return bool(trained - unchanged) if trained and unchanged is not None else None


def _training_of_ranks(first_step: FirstStep, known: Sequence[frozenset[str]]) -> JsonObject:
    """Return what the steps have changed, on all ranks."""
    untouched, hashes = frozenset.intersection(*known) if known else frozenset(), first_step.shard_hashes or {}
    return {
        "steps": first_step.num_steps,
        "examined_steps": len(first_step.later_hashes),
        "trained_parameters": len(hashes) if known else None,
        "changed_parameters": len(hashes) - len(untouched) if known else None,
        "unchanged_parameters": sorted(untouched),
    }


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
    results = gather_objects((settings, problems))
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


def check_training(run: ObservedRun, training: Mapping[str, Any], *, prepared: bool) -> list[Problem]:
    """Check that the steps of the run trained the model.

    Args:
        training: what the steps changed, on all ranks.
        prepared: whether an optimizer of the model was prepared.
    """
    first_step = run.first_step
    if prepared and not training["steps"] and first_step.num_forwards > 1:
        message = f"{first_step.num_forwards} training forwards, but no optimizer step was observed: the weights are "
        message += "those of the beginning."
        fix = "Call step() of the prepared optimizer after each backward, or after the last one of those whose "
        return [Problem(code="FSDP-E515", message=message, fix=f"{fix}gradients are accumulated.")]
    problems = []
    if training["trained_parameters"] and not training["changed_parameters"]:
        message = f"{first_step.num_steps} optimizer steps have changed no weight of the model."
        fix = "Check that step() of the prepared optimizer updates the parameters of the prepared model."
        problems.append(Problem(code="FSDP-E510", message=message, fix=fix))
    if first_step.num_steps and not first_step.has_rate:
        steps = plural(first_step.num_steps, "optimizer step")
        message = f"the learning rate was 0 in all {steps}: no weight was trained."
        problems.append(Problem(code="FSDP-W519", message=message, fix="Check the learning rate and its schedule."))
    if first_step.num_evaluating and (mode_dependent := _mode_dependent(run.model)):
        message = f"the model was in eval mode in {first_step.num_evaluating} of {training['steps']} steps, in which "
        message += f"{format_names(mode_dependent, 2)} did not act as in training."
        fix = "Call model.train() before the training, and again after each evaluation."
        problems.append(Problem(code="FSDP-W516", message=message, fix=fix))
    return problems


def observed_batch(batch: BatchShape | None, first_step: FirstStep) -> BatchShape | None:
    """Return the input of a step as this rank has observed it, if that is smaller than what the arguments give.

    More rows or forwards may be pairs of samples, or several forwards of the same samples. Fewer rows may be packed
    samples. If the batch size is another dimension of the inputs, the rows are no samples.
    """
    if batch is None:
        return None
    rows, forwards = _usual(first_step.batch_sizes), _usual(first_step.accumulation) or batch.accumulation
    if rows is None or first_step.is_packed or batch.per_device in first_step.input_sizes:
        rows = batch.per_device
    if rows * forwards >= batch.per_device * batch.accumulation:
        return batch
    return replace(batch, per_device=min(rows, batch.per_device), accumulation=min(forwards, batch.accumulation))


def observed_length(batch: BatchShape | None, first_step: FirstStep) -> int | None:
    """Return the tokens per sequence; ``None`` if sequences have different lengths or are not the rows of a forward."""
    if batch is None or _usual(first_step.batch_sizes) != batch.per_device:
        return None
    return _usual(first_step.lengths)


def _usual(counts: Counter[int]) -> int | None:
    """Return the number that is at least three quarters of several ones; ``None`` without such a number."""
    (usual, times), *_ = counts.most_common(1) or [(0, 0)]
    return usual if times > 1 and 4 * times >= 3 * counts.total() else None


def batch_of_ranks(
    batches: Sequence[tuple[BatchShape | None, BatchShape | None]], num_data_ranks: int
) -> tuple[BatchShape | None, list[Problem]]:
    """Return the input of a step of all ranks, and a warning if it is not the requested one, or differs by rank.

    Args:
        batches: for each rank, what the arguments give, and what was observed.
        num_data_ranks: number of ranks that read different samples.
    """
    asked, found = min(batches, key=lambda each: each[1] == each[0])  # of a rank on which they differ, if there is one
    if asked is None or found is None:
        return None, []
    problems = []
    if found != asked:
        message = f"{asked.per_device} samples per forward and {asked.accumulation} forwards per optimizer step were "
        message += f"requested, but {found.per_device} and {found.accumulation} were observed."
        fix = "In a loop, run each batch in the block `with accelerator.accumulate(model):`. If the collator packs "
        fix += "samples in one row, pass position_ids: otherwise tokens attend to the other samples of the row."
        problems.append(Problem(code="FSDP-W512", message=message, fix=fix))
    sizes = [each.per_device * each.accumulation for _, each in batches if each is not None]
    if len(sizes) == len(batches) and len(set(sizes)) > 1:
        message = f"the ranks have batches of different sizes: {min(sizes)} to {max(sizes)} samples per optimizer step."
        fix = "Give all ranks the same batch size: the gradients of the ranks are averaged with equal weights."
        problems.append(Problem(code="FSDP-W512", message=message, fix=fix))
        found = replace(found, all_ranks=sum(sizes) * num_data_ranks // len(sizes))
    return found, problems


def check_options(ranks: Sequence[Mapping[tuple[int, str, str], Any]]) -> list[Problem]:
    """Check that the options of optimizers, such as the learning rate, are the same on all ranks."""
    differing: dict[tuple[str, str], Problem] = {}
    for key, own in ranks[0].items():
        step, optimizer, option = key
        other = next((rank for rank, options in enumerate(ranks) if options.get(key, own) != own), None)
        if other is None or (optimizer, option) in differing:
            continue
        pairs = zip(own, ranks[other][key], strict=False)
        values = next((pair for pair in pairs if pair[0] != pair[1]), (own, ranks[other][key]))
        message = f"{option} of {optimizer} differs by rank in step {step}: {values[0]} on rank 0, {values[1]} on rank "
        message += f"{other}. Each rank updates its shards with its own value."
        fix = "Set the options of optimizers and the schedule of the learning rate to the same values on all ranks."
        differing[optimizer, option] = Problem(code="FSDP-W520", message=message, fix=fix)
    return list(differing.values())


def check_structure(units: Sequence[UnitObservation], plan: FsdpPlan, *, trained: bool = True) -> list[Problem]:
    """Check that the model has units and, if it is trained, that their weights have the planned dtype."""
    if not units:
        message = f"nothing is sharded: {plan.model_class} has no FSDP unit, so every rank has the whole model."
        fix = "Call install() before the Accelerator or Trainer is created, so that the plugin shards the model."
        return [Problem(code="FSDP-E501", message=message, fix=fix)]
    master = plan.precision.master
    differing = [unit for unit in units if unit.num_trainable and unit.master_dtype != master]
    if master == "unchanged" or not differing or plan.pre_sharded or not trained:
        return []
    first = differing[0]
    message = f"{len(differing)} units keep and update their weights in {first.master_dtype} instead of {master}, "
    message += f"for example {first.name or 'the root'}."
    fix = f"Load the model in {master}, and do not cast it after prepare()."
    return [Problem(code="FSDP-E502", setting="precision.param", message=message, fix=fix)]


def _mode_dependent(model: nn.Module) -> list[str]:
    """Return the names of the modules that compute something else in training mode: dropout and batch norm."""
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)

    def depends(module: nn.Module) -> bool:
        # BART, OPT and Llama have a rate that they pass to nn.functional.dropout.
        rates = [value for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
        rates += [module.p] if isinstance(module, dropouts) else []
        return isinstance(module, norms) or any(rate > 0 for rate in rates)

    return [canonical_name(name) for name, module in model.named_modules() if depends(module)]
