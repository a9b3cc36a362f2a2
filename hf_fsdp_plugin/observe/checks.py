"""Problems of a run that belong to no setting: its units, what the optimizer steps changed, and its batches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hf_fsdp_plugin.contracts import off_warning
from hf_fsdp_plugin.observe.first_step import FirstStep
from hf_fsdp_plugin.observe.report import TrainingObservation
from hf_fsdp_plugin.observe.units import StructureComparison, UnitObservation
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names


def check_training(
    model: nn.Module,
    first_step: FirstStep,
    structure: StructureComparison,
    training: TrainingObservation,
    *,
    prepared: bool,
) -> list[Problem]:
    """Check that the run trained what the plan trains, with constant batches.

    Args:
        training: what the steps changed, on all ranks.
        prepared: whether an optimizer of the model was prepared.
    """
    problems = []
    if prepared and not training.steps and first_step.num_backwards > 1:
        message = f"{first_step.num_backwards} backwards, but no optimizer step was observed: the weights are those of "
        message += "the beginning."
        fix = (
            "Call step() of the prepared optimizer after each backward, or after the last one of those whose gradients "
            "are accumulated."
        )
        problems.append(Problem(code="FSDP-E515", message=message, fix=fix))
    if training.trained_parameters and not training.changed_parameters:
        message = f"{first_step.num_steps} optimizer steps have changed no weight of the model."
        fix = "Check that step() of the prepared optimizer updates the parameters of the prepared model."
        problems.append(Problem(code="FSDP-E510", message=message, fix=fix))
    if first_step.num_evaluating and (mode_dependent := _mode_dependent(model)):
        message = f"the model was in eval mode in {first_step.num_evaluating} of {training.steps} steps, in which "
        message += f"{format_names(mode_dependent, 2)} did not act as in training."
        fix = "Call model.train() before the training, and again after each evaluation."
        problems.append(Problem(code="FSDP-W516", message=message, fix=fix))
    if structure.frozen:
        message = f"{len(structure.frozen)} parameters were trainable in prepare() and are frozen now: "
        message += f"{format_names(structure.frozen, 2)}."
        fix = "Freeze parameters before prepare(): FSDP then reserves no memory for their gradients."
        problems.append(Problem(code="FSDP-W511", message=message, fix=fix))
    for numbers, what in (
        (first_step.batch_sizes.values, "the batch size of a forward"),
        (first_step.accumulation.values, "the number of forwards per optimizer step"),
    ):
        if len(numbers) > 1:
            message = f"{what} changed during the run: {', then '.join(map(str, numbers))}. "
            message += "The report's effective batch size holds for a part of it."
            problems.append(Problem(code="FSDP-W512", message=message))
    return problems


def check_structure(units: Sequence[UnitObservation], plan: FsdpPlan) -> list[Problem]:
    """Check that the model has units, and that their weights have the planned dtype."""
    if not units:
        message = (
            f"nothing is sharded: no module of {plan.model_class} is an FSDP unit, so every rank has the whole model."
        )
        fix = "Call install() before the Accelerator or Trainer is created, so that the plugin shards the model."
        return [Problem(code="FSDP-E501", message=message, fix=fix)]
    master = plan.precision.master
    differing = [unit for unit in units if unit.num_frozen < unit.num_params and unit.master_dtype != master]
    if master == "unchanged" or not differing or plan.pre_sharded:
        return []
    message = (
        f"{len(differing)} units keep and update their weights in {differing[0].master_dtype} instead of {master}, "
    )
    message += f"for example {differing[0].name or 'the root'}."
    fix = f"Load the model in {master}, and do not cast it after prepare()."
    return [Problem(code="FSDP-E502", setting="precision.param", message=message, fix=fix)]


def unobservable_facts(units: Sequence[UnitObservation]) -> list[Problem]:
    """Return a warning for each attribute of torch that does not exist, so that a fact of the units is unknown."""
    errors = {error.reason: error for unit in units for error in unit.live.unknown.values()}
    return [off_warning(error) for error in errors.values()]


def _mode_dependent(model: nn.Module) -> list[str]:
    """Return the names of the modules that compute something else in training mode: dropout and batch norm."""
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
    return [
        canonical_name(name)
        for name, module in model.named_modules()
        if isinstance(module, norms) or (isinstance(module, dropouts) and module.p > 0) or _has_dropout_rate(module)
    ]


def _has_dropout_rate(module: nn.Module) -> bool:
    """Return whether the module has a rate that it passes to ``nn.functional.dropout``, as BART, OPT and Llama do."""
    return any("dropout" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())
