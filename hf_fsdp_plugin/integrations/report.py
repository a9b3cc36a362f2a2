"""The public function ``report``, for a prepared model, an ``Accelerator`` or a ``Trainer``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_fsdp_plugin.checkpoint import stored_state_dict_type
from hf_fsdp_plugin.hangs.step_count import step_count
from hf_fsdp_plugin.integrations.accelerate.private import (
    is_accelerator,
    prepared_dataloaders,
    prepared_models,
    prepared_optimizers,
)
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.integrations.transformers.private import is_trainer, train_batch_size
from hf_fsdp_plugin.observe.build import build_report_of_trained
from hf_fsdp_plugin.observe.live_run import common_value
from hf_fsdp_plugin.observe.report import BatchShape, Report


def report(subject: Any) -> Report:
    """Return the report of a prepared model, an ``Accelerator`` or a ``Trainer``. Collective.

    Raises:
        SpecError: ``subject`` is none of these, or the plugin has not prepared its model.
    """
    accelerator = getattr(subject, "accelerator", subject)
    if not is_accelerator(accelerator):
        return build_report_of_trained([subject])
    batch = None
    if is_trainer(subject):
        batch = BatchShape(per_device=train_batch_size(subject), accumulation=subject.args.gradient_accumulation_steps)
    return report_accelerator(accelerator, batch=batch)


def report_accelerator(
    accelerator: Any,
    *,
    batch: BatchShape | None = None,
    checkpoint: Path | None = None,
    saved_asynchronously: bool | None = None,
) -> Report:
    """Return the report of an ``Accelerator``. Collective.

    Args:
        batch: the input of one optimizer step. Default: derived from the first data loader with a batch size.
        checkpoint: a checkpoint of this run. If checkpoints were saved, their state dict types are reported, else that
            of the accelerator.
        saved_asynchronously: whether the last checkpoint was written asynchronously; ``None`` if there is none.

    Raises:
        SpecError: the plugin has prepared no model of this accelerator.
    """
    saved = stored_state_dict_type(checkpoint) if checkpoint is not None else None
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    kinds = {kind for model in prepared_models(accelerator) for kind in manager.saved_kinds(model)}
    if saved is not None:
        kinds.add(saved)
    report = build_report_of_trained(
        [*prepared_models(accelerator), *getattr(plugin, "evaluated_models", ())],
        prepared_optimizers(accelerator),
        batch=batch or _loader_batch(accelerator),
        state_dict=common_value(sorted(kinds)) or _next_state_dict(accelerator),
        saved_asynchronously=saved_asynchronously,
    )
    return replace(report, restarts=session.restarts, steps_before=step_count.before)


def _next_state_dict(accelerator: Any) -> str | None:
    """Return the state dict type of the accelerator's next save: ``full``, ``sharded`` or ``local``."""
    state_dict_type = getattr(getattr(accelerator.state, "fsdp_plugin", None), "state_dict_type", None)
    if state_dict_type is None:
        return None
    return str(getattr(state_dict_type, "name", state_dict_type)).upper().removesuffix("_STATE_DICT").lower()


def _loader_batch(accelerator: Any) -> BatchShape | None:
    for loader in prepared_dataloaders(accelerator):
        sampler: Any = getattr(loader, "batch_sampler", None)
        if size := getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None):
            if getattr(sampler, "split_batches", False):
                size //= sampler.num_processes
            return BatchShape(per_device=size, accumulation=accelerator.gradient_accumulation_steps)
    return None
