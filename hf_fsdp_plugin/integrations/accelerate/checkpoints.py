"""Replacements of ``Accelerator.save_state``, ``load_state`` and ``save_model``; read from accelerate 1.15.

Every rank writes its shards to a staging folder, which is renamed when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hf_fsdp_plugin.backends.agreement import on_all_ranks
from hf_fsdp_plugin.backends.shard import plan_of
from hf_fsdp_plugin.checkpoint import (
    newest_complete,
    numbered_checkpoints,
    recover_interrupted_commit,
    recover_run,
    remove_checkpoint,
)
from hf_fsdp_plugin.checkpoint.names import ACCELERATE_PREFIX, ACCELERATE_RUN
from hf_fsdp_plugin.integrations.accelerate import private
from hf_fsdp_plugin.integrations.accelerate.plugin import PlannedFsdpPlugin, if_sharded
from hf_fsdp_plugin.integrations.resuming import check_complete, warn_differences, warn_skipped
from hf_fsdp_plugin.integrations.saving import manager, manifest
from hf_fsdp_plugin.plan.names import unwrapped


@if_sharded
def save_state(
    original: Callable[..., Any], accelerator: Any, output_dir: Any = None, *args: Any, **kwargs: Any
) -> Path:
    """Write a checkpoint to a staging folder, rename it to ``output_dir``, then delete the oldest checkpoints."""
    plugin: PlannedFsdpPlugin = accelerator.state.fsdp_plugin
    project = accelerator.project_configuration
    named_by_us = project.automatic_checkpoint_naming
    run = Path(accelerator.project_dir) / ACCELERATE_RUN if named_by_us else None
    final = Path(output_dir).expanduser() if run is None else run / f"{ACCELERATE_PREFIX}{accelerator.save_iteration}"
    if run is not None and final.exists():
        raise ValueError(
            f"checkpoint {final} already exists. Set accelerator.project_configuration.iteration to the number of the "
            "next checkpoint."
        )
    asynchronous = plugin.spec.checkpoint.asynchronous
    with manager.saving(final, asynchronous=asynchronous) as save:
        project.automatic_checkpoint_naming = False
        try:
            original(str(save.folder), *args, **kwargs)
        finally:
            project.automatic_checkpoint_naming = named_by_us
        _write_configs(accelerator, save.folder)
    facts = manifest(
        _first_sharded(accelerator),
        plugin.state_dict_kind,
        step=accelerator.step or None,
        asynchronous=asynchronous,
        batch={"world_size": dist.get_world_size()},
    )
    manager.finish(save, facts, after=lambda: _rotate(run, project.total_limit) if run is not None else None)
    return final


def _first_sharded(accelerator: Any) -> Any:
    return next(model for model in private.prepared_models(accelerator) if plan_of(model) is not None)


def _write_configs(accelerator: Any, folder: Path) -> None:
    """Write the configs of the first sharded model, which are needed to load the weights."""
    with on_all_ranks(f"writing {folder}"):
        if dist.get_rank() == 0:
            write_model_config(_first_sharded(accelerator), folder)


def write_model_config(model: Any, folder: Path) -> None:
    """Write ``config.json`` and ``generation_config.json``, if the model has them. To be called on one rank."""
    inner: Any = unwrapped(model)
    config: Any = getattr(inner, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    # As the model's `save_pretrained` does. FSDP2 adds a prefix to the class name.
    config.architectures = [type(inner).__name__.removeprefix("FSDP")]
    config.save_pretrained(str(folder))
    if getattr(inner, "generation_config", None) is not None and inner.can_generate():
        inner.generation_config.save_pretrained(str(folder))


def _rotate(run: Path, limit: int | None) -> None:
    for path in numbered_checkpoints(run, ACCELERATE_PREFIX)[limit:] if limit else ():
        remove_checkpoint(path)


@if_sharded
def load_state(original: Callable[..., Any], accelerator: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Load a complete checkpoint; without ``input_dir``, the newest one with Accelerate's automatic name."""
    manager.wait()
    with on_all_ranks("looking for a checkpoint"):
        path = Path(input_dir).expanduser() if input_dir is not None else None
        run = Path(accelerator.project_dir) / ACCELERATE_RUN if accelerator.project_dir else None
        if dist.get_rank() == 0:
            if path is not None:
                recover_interrupted_commit(path)
            elif run is not None:
                recover_run(run, ACCELERATE_PREFIX)
    with on_all_ranks("looking for a checkpoint"):
        if path is None and accelerator.project_configuration.automatic_checkpoint_naming and run is not None:
            path, skipped = newest_complete(run, ACCELERATE_PREFIX)
            warn_skipped(skipped)
        if path is not None and path.is_dir():
            check_complete(path, "Load a complete checkpoint.")
            warn_differences(path, {})
    return original(str(path) if path is not None else None, *args, **kwargs)


@if_sharded
def save_model(
    original: Callable[..., Any],
    accelerator: Any,
    model: Any,
    save_directory: Any,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Write a folder for ``from_pretrained``. Every rank writes its shards; no rank gathers the model."""
    if plan_of(model) is None or not safe_serialization:
        original(model, save_directory, max_shard_size, safe_serialization)
        return
    size = private.parse_size(max_shard_size)
    with manager.saving(Path(save_directory), into=True) as save:
        with on_all_ranks(f"writing {save_directory}"):
            if dist.get_rank() == 0:
                write_model_config(model, save.folder)
        manager.save_model(model, save.folder, "full", max_shard_size=size)
    manager.finish(save, manifest(model, "full", step=accelerator.step or None, batch={}))
