"""The Trainer under a planned FSDP: an accelerator from the spec, evaluation before training, a report after it.

Each change is a function around one of the Trainer's methods. The mixin applies them to a subclass, ``install`` to
the class.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments
from transformers.utils import find_labels

from hf_fsdp_plugin.backends.fsdp2 import reshard
from hf_fsdp_plugin.checkpoint.writing import save as saves
from hf_fsdp_plugin.integrations import session
from hf_fsdp_plugin.integrations.accelerate.prepare import planned_plugin
from hf_fsdp_plugin.integrations.hooks import hook_accelerate, hook_trainer_checkpoints
from hf_fsdp_plugin.integrations.run_report import finish
from hf_fsdp_plugin.integrations.transformers.arguments import follow_launcher, process_fsdp_args
from hf_fsdp_plugin.integrations.transformers.checkpoints import (
    checkpoint_to_resume,
    finalize_training,
    load_best_model,
    load_rng_state,
    save_checkpoint,
    save_model,
)
from hf_fsdp_plugin.observe.report import BatchShape
from hf_fsdp_plugin.plan.names import unwrapped


def create_accelerator(original: Callable[[], None], trainer: Any) -> None:
    """The accelerator gets the spec that was read from the Trainer's arguments.

    The Trainer refuses ``save_only_model`` with a sharded state dict, whose model it would not save, and with
    ``load_best_model_at_end``; our checkpoints have the model whatever their kind.
    """
    spec = session.spec_of_arguments(trainer.args)
    only_model = trainer.args.save_only_model
    trainer.args.save_only_model = only_model and spec is None
    try:
        with session.using(spec):
            original()
    finally:
        trainer.args.save_only_model = only_model


def signature_columns(original: Callable[[], None], trainer: Any) -> None:
    """The columns that the model takes: those of the author's model, not of FSDP1's wrapper round it, which takes
    anything by name and so leaves the Trainer nothing to keep.
    """
    given, inner = trainer.model, unwrapped(trainer.model)
    if inner is not given and not trainer.label_names:
        trainer.label_names = find_labels(type(inner))
    trainer.model = inner
    try:
        original()
    finally:
        trainer.model = given


def evaluation_loop(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Before training, the model is sharded here, once; the Trainer would raise under FSDP2 and train on unsharded
    parameters afterwards under FSDP1.
    """
    if planned_plugin(trainer.accelerator) is not None and not trainer.accelerator._models:
        trainer.model = trainer.model_wrapped = trainer.accelerator.prepare(trainer.model)
    output = original(*args, **kwargs)
    if planned_plugin(trainer.accelerator) is not None:
        reshard(trainer.model)
    return output


def train(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """It goes on from a complete checkpoint, and ends with its report."""
    planned = planned_plugin(trainer.accelerator) is not None
    asked = args[0] if args else kwargs.get("resume_from_checkpoint")
    if planned and asked:
        found = checkpoint_to_resume(trainer, asked)
        args, kwargs = (found, *args[1:]), {k: v for k, v in kwargs.items() if k != "resume_from_checkpoint"}
    result = original(*args, **kwargs)
    if planned:
        saves.wait()
        arguments = trainer.args
        batch = BatchShape(
            per_device=arguments.per_device_train_batch_size, accumulation=arguments.gradient_accumulation_steps
        )
        checkpoint = Path(arguments.output_dir) / f"checkpoint-{trainer.state.global_step}"
        finish(
            trainer.accelerator,
            output_dir=arguments.output_dir,
            batch=batch,
            checkpoint=checkpoint if checkpoint.is_dir() else None,
        )
    return result


AROUND: dict[str, Callable[..., Any]] = {
    "create_accelerator_and_postprocess": create_accelerator,
    "_set_signature_columns_if_needed": signature_columns,
    "evaluation_loop": evaluation_loop,
    "save_model": save_model,
    "train": train,
    "_save_checkpoint": save_checkpoint,
    "_load_best_model": load_best_model,
    "_finalize_training": finalize_training,
    "_load_rng_state": load_rng_state,
}


class FsdpTrainerMixin:
    """For Trainers of other libraries: ``class MyTrainer(FsdpTrainerMixin, SFTTrainer)``.

    Use it with :class:`FsdpTrainingArguments` (or after ``install``), which read the settings.
    """

    def create_accelerator_and_postprocess(self) -> None:
        hook_accelerate()
        hook_trainer_checkpoints()
        create_accelerator(super().create_accelerator_and_postprocess, self)  # type: ignore[misc]

    def _set_signature_columns_if_needed(self) -> None:
        signature_columns(super()._set_signature_columns_if_needed, self)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        return evaluation_loop(super().evaluation_loop, self, *args, **kwargs)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> Any:
        return save_model(super().save_model, self, output_dir, _internal_call)  # type: ignore[misc]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        return train(super().train, self, *args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        save_checkpoint(super()._save_checkpoint, self, model, trial)  # type: ignore[misc]

    def _load_best_model(self) -> Any:
        return load_best_model(super()._load_best_model, self)  # type: ignore[misc]

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        return finalize_training(super()._finalize_training, self, *args, **kwargs)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        load_rng_state(super()._load_rng_state, self, checkpoint)  # type: ignore[misc]


class FsdpTrainer(FsdpTrainerMixin, Trainer):
    """``transformers.Trainer`` that runs FSDP as it was asked for and reports what ran."""


class FsdpTrainingArguments(TrainingArguments):
    """``transformers.TrainingArguments`` that loses no FSDP setting and refuses what cannot be had."""

    def __post_init__(self) -> None:
        hook_accelerate()
        follow_launcher(self)
        super().__post_init__()

    def _process_fsdp_args(self) -> Any:
        return process_fsdp_args(super()._process_fsdp_args, self)
