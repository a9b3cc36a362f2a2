"""The checkpoint manager of this process, which saves of Accelerate and the Trainer share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from hf_fsdp_plugin.backends.optimizer import owner_of
from hf_fsdp_plugin.backends.shard import plan_of
from hf_fsdp_plugin.checkpoint import CheckpointManager, read_manifest
from hf_fsdp_plugin.checkpoint.names import HF_MODEL
from hf_fsdp_plugin.integrations.accelerate.private import prepared_models, prepared_optimizers
from hf_fsdp_plugin.integrations.session import session
from hf_fsdp_plugin.spec.model import StateDictKind

_HF_WEIGHTS: Final = re.compile(rf"{HF_MODEL}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")

manager = CheckpointManager(in_flight_file=lambda: session.in_flight_file)
"""Writes the checkpoints of every Accelerator and Trainer in this process."""


def remove_stale_weights(folder: Path) -> None:
    """Remove the weight files of an earlier save that the new one in ``folder`` has not replaced.

    ``from_pretrained`` reads ``model.safetensors`` before an index. Without this, a model that is saved in several
    files to the folder of a model in one file would be loaded with the old weights.
    """
    manifest = read_manifest(folder)
    new = {record.path for record in manifest.files} if manifest is not None else set()
    for path in folder.glob(f"{HF_MODEL}*"):
        if _HF_WEIGHTS.fullmatch(path.name) and path.name not in new:
            path.unlink()


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
        owners = [(owner_of(optimizer, models), optimizer) for optimizer in optimizers]
        manager.prepare_buffers(models, [(owner, each) for owner, each in owners if owner is not None], kind)

    hook = prepared_optimizers(accelerator)[-1].optimizer.register_step_post_hook(prepare)
