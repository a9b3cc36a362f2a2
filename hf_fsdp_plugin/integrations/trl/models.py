"""The replacement of ``prepare_fsdp``, with which TRL's Trainers shard a reference, teacher or reward model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hf_fsdp_plugin.integrations.accelerate.plugin import planned_plugin
from hf_fsdp_plugin.integrations.accelerate.prepare import prepare_for_evaluation


def prepare_fsdp(original: Callable[..., Any], model: nn.Module, accelerator: Any) -> Any:
    """Shard a model that is not trained by a plan, and return it in evaluation mode. Collective."""
    if planned_plugin(accelerator) is None:
        return original(model, accelerator)
    return prepare_for_evaluation(accelerator, model)
