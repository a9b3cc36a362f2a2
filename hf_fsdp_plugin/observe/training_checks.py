"""Problems of a run that belong to no setting: what the optimizer steps changed, and which batches they used."""

from __future__ import annotations

from collections.abc import Sequence

from hf_fsdp_plugin.observe.first_step import FirstStep
from hf_fsdp_plugin.observe.report import TrainingObservation
from hf_fsdp_plugin.observe.runs import Runs
from hf_fsdp_plugin.observe.structure import StructureComparison
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names


def check_training(
    first_step: FirstStep,
    structure: StructureComparison,
    training: TrainingObservation,
    *,
    prepared: bool,
    mode_dependent: Sequence[str] = (),
) -> list[Problem]:
    """Check that the run trained what the plan trains, with constant batches.

    Args:
        training: what the steps changed, on all ranks.
        prepared: whether an optimizer of the model was prepared.
        mode_dependent: names of the modules that behave differently in training mode.
    """
    problems = []
    if prepared and not training.steps and first_step.num_backwards > 1:
        problems.append(
            Problem(
                code="FSDP-E515",
                message=f"{first_step.num_backwards} backwards, but no optimizer step was observed: the weights are "
                "those of the beginning.",
                fix="Call step() of the prepared optimizer after each backward, or after the last one of those whose "
                "gradients are accumulated.",
            )
        )
    if training.trained_parameters and not training.changed_parameters:
        problems.append(
            Problem(
                code="FSDP-E510",
                message=f"{first_step.num_steps} optimizer steps have changed no weight of the model.",
                fix="Check that step() of the prepared optimizer updates the parameters of the prepared model.",
            )
        )
    if first_step.num_evaluating and mode_dependent:
        problems.append(
            Problem(
                code="FSDP-W516",
                message=f"the model was in eval mode in {first_step.num_evaluating} of {training.steps} steps, "
                f"in which {format_names(mode_dependent, 2)} did not act as in training.",
                fix="Call model.train() before the training, and again after each evaluation.",
            )
        )
    if structure.frozen:
        problems.append(
            Problem(
                code="FSDP-W511",
                message=f"{len(structure.frozen)} parameters were trainable in prepare() and are frozen now: "
                f"{format_names(structure.frozen, 2)}.",
                fix="Freeze parameters before prepare(): FSDP then reserves no memory for their gradients.",
            )
        )
    problems += _check_constant(first_step.batch_sizes, "the batch size of a forward")
    problems += _check_constant(first_step.accumulation, "the number of forwards per optimizer step")
    return problems


def _check_constant(runs: Runs, what: str) -> list[Problem]:
    if len(runs.values) < 2:
        return []
    values = ", then ".join(map(str, runs.values))
    message = f"{what} changed during the run: {values}. The report's effective batch size holds for a part of it."
    return [Problem(code="FSDP-W512", message=message)]
