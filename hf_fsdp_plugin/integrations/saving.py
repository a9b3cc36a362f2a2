"""The checkpoint manager of this process, which saves of Accelerate and the Trainer share."""

from __future__ import annotations

from typing import Any

from hf_fsdp_plugin.backends.shard import plan_of
from hf_fsdp_plugin.checkpoint import CheckpointManager
from hf_fsdp_plugin.integrations.accelerate.private import prepared_models, prepared_optimizers
from hf_fsdp_plugin.spec.model import StateDictKind

manager = CheckpointManager()
"""Writes the checkpoints of every Accelerator and Trainer in this process."""


def prepare_buffers_after_first_step(accelerator: Any, kind: StateDictKind) -> None:
    """After the first optimizer step, start to allocate the memory of asynchronous saves in the background.

    Before the first step, an optimizer has no state, so the size of the save is unknown.
    """
    if not prepared_optimizers(accelerator):
        return

    def prepare(*_: Any) -> None:
        hook.remove()
        models = [model for model in prepared_models(accelerator) if plan_of(model) is not None]
        optimizers = [wrapper.optimizer for wrapper in prepared_optimizers(accelerator)]
        manager.prepare_buffers(models, zip(prepared_models(accelerator), optimizers, strict=False), kind)

    hook = prepared_optimizers(accelerator)[-1].optimizer.register_step_post_hook(prepare)
