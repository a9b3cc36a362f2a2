"""The replacement of ``Seq2SeqTrainer.prediction_step``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.fsdp import FullyShardedDataParallel

from hf_fsdp_plugin.integrations.accelerate.plugin import if_sharded


@if_sharded
def prediction_step(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate with the module inside FSDP1's wrapper, so that the Trainer does not gather the whole model.

    It gathers unit by unit, as in a forward. The loss is computed by the wrapper, which is the first of ``args``.
    """
    wrapped = trainer.model
    if not isinstance(wrapped, FullyShardedDataParallel):
        return original(*args, **kwargs)
    trainer.model = wrapped.module
    try:
        return original(*args, **kwargs)
    finally:
        trainer.model = wrapped
