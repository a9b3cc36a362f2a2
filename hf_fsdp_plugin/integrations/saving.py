"""The checkpoint manager of the process and the manifest, for saves by the Trainer and by Accelerate."""

from __future__ import annotations

import datetime
from importlib.metadata import version
from typing import Any

import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.shard import plan_of
from hf_fsdp_plugin.checkpoint import CheckpointManager, Manifest, model_shards
from hf_fsdp_plugin.integrations.accelerate.private import prepared_models, prepared_optimizers
from hf_fsdp_plugin.spec.model import StateDictKind
from hf_fsdp_plugin.version import __version__

manager = CheckpointManager()
"""Writes the checkpoints of this process, whichever Accelerator or Trainer saves them."""


def manifest(
    model: nn.Module, kind: StateDictKind, *, step: int | None, asynchronous: bool = False, batch: dict[str, Any]
) -> Manifest:
    """Return the manifest of a checkpoint of ``model``, without the list of files. No communication."""
    plan = plan_of(model)
    assert plan is not None, "models without a plan are saved by Accelerate"
    shards = model_shards(model)
    parameters = {shard.name: (shard.dtype_name, shard.shape) for shard in shards.tensors}
    parameters |= {alias: parameters[name] for alias, name in shards.aliases.items()}
    return Manifest(
        kind=kind,
        backend=plan.backend,
        world_size=dist.get_world_size(),
        mesh={"replicate": plan.mesh.replicate, "shard": plan.mesh.shard},
        strategy=plan.strategy,
        step=step,
        asynchronous=asynchronous,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={
            "hf_fsdp_plugin": __version__,
            **{name: version(name) for name in ("torch", "transformers", "accelerate")},
        },
        settings={name: value for name, value in plan.settings() if not name.startswith("launch.")},
        parameters=parameters,
        ties=shards.ties,
        files=(),
        batch=batch,
    )


def prepare_buffers_after_first_step(accelerator: Any, kind: StateDictKind) -> None:
    """After the first step, allocate the memory of the first asynchronous save in the background.

    Before that step an optimizer has no state, so the size of the save is unknown.
    """
    if not prepared_optimizers(accelerator):
        return

    def prepare(*_: Any) -> None:
        hook.remove()
        models = [model for model in prepared_models(accelerator) if plan_of(model) is not None]
        optimizers = [wrapper.optimizer for wrapper in prepared_optimizers(accelerator)]
        manager.prepare_buffers(models, zip(prepared_models(accelerator), optimizers, strict=False), kind)

    hook = prepared_optimizers(accelerator)[-1].optimizer.register_step_post_hook(prepare)
