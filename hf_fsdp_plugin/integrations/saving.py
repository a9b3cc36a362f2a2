"""What the Trainer's and Accelerate's saves have in common: the manifest, and errors that all ranks hear of."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin import __version__
from hf_fsdp_plugin.backends.agreement import on_all_ranks
from hf_fsdp_plugin.backends.shard import plan_of
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest
from hf_fsdp_plugin.checkpoint.shards import model_shards, optimizer_shards
from hf_fsdp_plugin.checkpoint.writing import save as saves
from hf_fsdp_plugin.checkpoint.writing.dcp import dtype_name
from hf_fsdp_plugin.checkpoint.writing.failures import in_words
from hf_fsdp_plugin.checkpoint.writing.images import on_accelerator
from hf_fsdp_plugin.checkpoint.writing.state_files import model_files, optimizer_files
from hf_fsdp_plugin.integrations.accelerate.private import prepared_models, prepared_optimizers
from hf_fsdp_plugin.spec.model import StateDictKind


@contextmanager
def saving(final: Path, *, asynchronous: bool = False, into: bool = False) -> Iterator[saves.Save]:
    """A save whose folder the host fills; the block ends with :meth:`Save.finish`.

    What fails in it, on whatever rank, is raised on all ranks, and nothing is left behind.
    """
    save = saves.begin(final.absolute(), asynchronous=asynchronous, into=into)
    try:
        with on_all_ranks(f"writing {final}"), in_words(save.staging.final):
            yield save
    except Exception:
        save.abandon()
        raise


def manifest(
    model: nn.Module, kind: StateDictKind, *, step: int | None, asynchronous: bool = False, batch: dict[str, Any]
) -> Manifest:
    """Everything about a checkpoint of ``model`` but its files. No communication."""
    plan = plan_of(model)
    assert plan is not None, "only planned models are saved by us"
    shards = model_shards(model)
    parameters = {held.name: (dtype_name(held.dtype), held.shape) for held in shards.tensors}
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


def prepare_memory_after_first_step(accelerator: Any, kind: StateDictKind) -> None:
    """Touch the memory that the first asynchronous save will need, beside the steps from the second on.

    Before the first step an optimizer has no state, and nobody knows how much there will be.
    """
    if not prepared_optimizers(accelerator):
        return

    def prepare(*_: Any) -> None:
        hook.remove()
        models = [model for model in prepared_models(accelerator) if plan_of(model) is not None]
        optimizers = [wrapper.optimizer for wrapper in prepared_optimizers(accelerator)]
        pairs = list(zip(prepared_models(accelerator), optimizers, strict=False))
        states = [model_files(model_shards(model), kind) for model in models]
        states += [optimizer_files(optimizer_shards(model, optimizer), kind) for model, optimizer in pairs]
        pinned = any(on_accelerator(state.images) for state in states)
        saves.prepare([sum(image.span for image in state.images) for state in states], pinned=pinned)

    hook = prepared_optimizers(accelerator)[-1].optimizer.register_step_post_hook(prepare)
