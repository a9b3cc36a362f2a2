"""Creates the manifest of a checkpoint from the model and its plan."""

from __future__ import annotations

import datetime
from importlib.metadata import version
from typing import Any

import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.shard import plan_of
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest
from hf_fsdp_plugin.checkpoint.shards import model_shards, trainable_shards
from hf_fsdp_plugin.spec.model import StateDictKind
from hf_fsdp_plugin.version import __version__


def manifest_of(
    model: nn.Module,
    kind: StateDictKind,
    *,
    step: int | None,
    asynchronous: bool = False,
    batch: dict[str, Any],
    run: dict[str, Any] | None = None,
    adapter_only: bool = False,
) -> Manifest:
    """Return the manifest for ``model``, which must have a plan. ``files`` is empty. No communication.

    Args:
        adapter_only: the checkpoint contains the parameters that are trained, and not those of the base model.
    """
    plan = plan_of(model)
    assert plan is not None, "models without a plan are saved by Accelerate"
    shards = trainable_shards(model_shards(model)) if adapter_only else model_shards(model)
    parameters = {shard.name: (shard.dtype_name, shard.shape) for shard in shards.tensors}
    parameters |= {alias: parameters[name] for alias, name in shards.aliases.items()}
    versions = {name: version(name) for name in ("torch", "transformers", "accelerate")}
    return Manifest(
        kind=kind,
        backend=plan.backend,
        world_size=dist.get_world_size(),
        mesh={"replicate": plan.mesh.replicate, "shard": plan.mesh.shard},
        strategy=plan.strategy,
        step=step,
        asynchronous=asynchronous,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={"hf_fsdp_plugin": __version__, **versions},
        settings={name: value for name, value in plan.settings() if not name.startswith("launch.")},
        parameters=parameters,
        ties=shards.ties,
        files=(),
        batch=batch,
        run=run or {},
    )
