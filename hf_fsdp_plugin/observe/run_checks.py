"""Checks of what a training has done: steps, batches, options of optimizers, and units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from hf_fsdp_plugin.observe.first_step import FirstStep
from hf_fsdp_plugin.observe.observed_run import ObservedRun
from hf_fsdp_plugin.observe.report import BatchShape
from hf_fsdp_plugin.observe.units import UnitObservation
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names


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
