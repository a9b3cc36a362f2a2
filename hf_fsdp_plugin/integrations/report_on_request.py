"""The report on request, of a model, an ``Accelerator`` or a ``Trainer``. ``run_report`` writes the one at the end."""

from __future__ import annotations

from typing import Any

from hf_fsdp_plugin.integrations.accelerate.private import is_accelerator
from hf_fsdp_plugin.integrations.accelerate.run_report import report_accelerator
from hf_fsdp_plugin.integrations.transformers.private import is_trainer, trainer_batch
from hf_fsdp_plugin.observe.report import Report
from hf_fsdp_plugin.observe.report_builder import build_report_of_trained


def report(subject: Any) -> Report:
    """Return the report of a prepared model, an ``Accelerator`` or a ``Trainer``. Collective.

    Raises:
        SpecError: ``subject`` is none of these, or the plugin has not prepared its model.
    """
    accelerator = getattr(subject, "accelerator", subject)
    if not is_accelerator(accelerator):
        return build_report_of_trained([subject])
    if not is_trainer(subject):
        return report_accelerator(accelerator)
    return report_accelerator(accelerator, batch=trainer_batch(subject))
