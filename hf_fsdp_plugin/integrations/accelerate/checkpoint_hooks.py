"""Replacements of ``Accelerator.save_state``, ``load_state`` and ``save_model``; read from accelerate 1.15.

Every rank writes its shards to a staging folder, which is renamed when it is complete.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.utils import convert_file_size_to_int
from accelerate.utils.modeling import is_peft_model

from hf_fsdp_plugin.backends.optimizers.parameters import owner_of
from hf_fsdp_plugin.backends.ranks.agreement import TRAINING_LIMIT, collective_call, on_all_ranks, wait_for_all_ranks
from hf_fsdp_plugin.backends.sharding.shard import locate_module, plan_of
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest
from hf_fsdp_plugin.checkpoint.names import ACCELERATE_PREFIX, ACCELERATE_RUN, custom_state_file
from hf_fsdp_plugin.checkpoint.reading.optimizer import load_optimizer, schedules_follow_groups
from hf_fsdp_plugin.checkpoint.reading.pickled_states import load_state_file
from hf_fsdp_plugin.checkpoint.reading.resharding import load_model
from hf_fsdp_plugin.checkpoint.writing.state_files import manifest_of
from hf_fsdp_plugin.integrations.accelerate import plugin as plugins
from hf_fsdp_plugin.integrations.accelerate.private import (
    prepared_models,
    prepared_schedulers,
    shared_state,
)
from hf_fsdp_plugin.integrations.accelerate.steps_after_restart import batch_of, keep_samples_per_step
from hf_fsdp_plugin.integrations.resuming import (
    continue_run,
    find_checkpoint,
    present_folder,
    run_fact,
    warn_differences,
)
from hf_fsdp_plugin.integrations.saving import call_name, exporting, manager, remove_oldest
from hf_fsdp_plugin.integrations.session import attributes_in_block, outer_calls
from hf_fsdp_plugin.observers import mark_phase
from hf_fsdp_plugin.plan.names import unwrapped


@plugins.if_sharded
@mark_phase("checkpoint")
def save_state(
    original: Callable[..., Any], accelerator: Any, output_dir: Any = None, *args: Any, **kwargs: Any
) -> Path:
    """Write a checkpoint to a staging folder, rename it, then delete the oldest checkpoints. Collective.

    The path is ``checkpoints/checkpoint_<iteration>`` in the project folder with automatic naming, else ``output_dir``.
    """
    plugin: plugins.PlannedFsdpPlugin = accelerator.state.fsdp_plugin
    project, run = accelerator.project_configuration, _run_folder(accelerator)
    final = Path(output_dir).expanduser() if run is None else run / f"{ACCELERATE_PREFIX}{accelerator.save_iteration}"
    if run is not None and final.exists():
        fix = "Set accelerator.project_configuration.iteration to the number of the next checkpoint."
        raise ValueError(f"checkpoint {final} already exists. {fix}")
    asynchronous = plugin.spec.checkpoint.asynchronous
    wait_for_all_ranks("Accelerator.save_state", limit=TRAINING_LIMIT)

    def manifest() -> Manifest:
        facts: dict[str, Any] = {
            "batch": batch_of(accelerator),
            "run": run_fact(),
            "parameters": save.parameters(model),
        }
        return manifest_of(model, plugin.state_dict_kind, step=accelerator.step or None, **facts)

    storage = plugin.spec.checkpoint.storage
    limit = project.total_limit if run is not None else None
    rotate = functools.partial(remove_oldest, final, ACCELERATE_PREFIX, limit, storage)
    with manager().saving(final, manifest, asynchronous=asynchronous, storage=storage, after=rotate) as save:
        project.automatic_checkpoint_naming = False
        try:
            original(str(save.folder), *args, **kwargs)
        finally:
            project.automatic_checkpoint_naming = run is not None
        model = next(model for model in prepared_models(accelerator) if plan_of(model) is not None)
        _write_config(model, save.folder)
    return final


def _run_folder(accelerator: Any) -> Path | None:
    """Return the folder of the checkpoints with automatic names; ``None`` without these."""
    is_automatic = accelerator.project_configuration.automatic_checkpoint_naming
    return Path(accelerator.project_dir) / ACCELERATE_RUN if is_automatic else None


def _write_config(model: Any, folder: Path) -> None:
    """Write ``config.json`` and ``generation_config.json`` on rank 0, if the model has them. Collective."""
    inner: Any = unwrapped(model)
    config: Any = getattr(inner, "config", None)
    with on_all_ranks(f"writing {folder}"):
        if dist.get_rank() != 0 or not hasattr(config, "save_pretrained"):
            return
        config.architectures = [type(inner).__name__]  # as `save_pretrained` does
        config.save_pretrained(str(folder))
        if getattr(inner, "generation_config", None) is not None and inner.can_generate():
            inner.generation_config.save_pretrained(str(folder))


@plugins.if_sharded
def load_state(original: Callable[..., Any], accelerator: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Load a complete checkpoint: ``input_dir``, or the newest one with an automatic name. Collective.

    It may have been written by any number of ranks, with either FSDP version. The comments are the steps of a resume.
    """
    # 1. All ranks meet, select a complete checkpoint, and check its small files.
    wait_for_all_ranks("Accelerator.load_state", limit=TRAINING_LIMIT)
    selected = os.path.expanduser(input_dir) if input_dir is not None else None
    load_kwargs = (args[0] if args else kwargs.get("load_kwargs")) or {}
    allow_pickles = load_kwargs.get("weights_only") is False
    setting = accelerator.state.fsdp_plugin.spec.checkpoint
    fix = "Load a complete checkpoint."
    run = _run_folder(accelerator)
    path = find_checkpoint(run, ACCELERATE_PREFIX, selected, setting, fix=fix, allow_pickles=allow_pickles)
    if path is None:
        return original(None, *args, **kwargs)
    # 2. Warn of what is different in this world, such as random states; the number of steps goes on.
    warn_differences(path, {})
    saved = continue_run(path)
    # 3. Accelerate loads its parts. Its calls of load_fsdp_model and load_fsdp_optimizer are replaced: they read the
    #    elements of this rank's shards (checkpoint.reading.resharding.load_stored).
    schedulers = [scheduler.scheduler for scheduler in prepared_schedulers(accelerator)]
    with attributes_in_block(outer_calls(), allows_pickles=allow_pickles), schedules_follow_groups(schedulers):
        result = original(str(path), *args, **kwargs)
    # 4. After a restart with another number of ranks, an optimizer step keeps its samples.
    if saved:
        keep_samples_per_step(accelerator, path, saved)
    return result


def load_custom_state(original: Callable[..., None], obj: Any, path: Any, index: int = 0) -> None:
    """Load the state of a registered object without executing anything that its file may contain."""
    is_planned = isinstance(shared_state().get("fsdp_plugin"), plugins.PlannedFsdpPlugin)
    if not is_planned or outer_calls().allows_pickles:
        original(obj, path, index)
        return
    obj.load_state_dict(load_state_file(Path(path) / custom_state_file(index)))


@plugins.if_sharded
def save_model(
    original: Callable[..., Any],
    accelerator: Any,
    model: Any,
    save_directory: Any,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Write a folder for ``from_pretrained``. Every rank writes its shards; no rank gathers the model.

    A part of a sharded model is gathered on rank 0. A model that is not sharded is written by the main process.
    """
    place = locate_module(model)
    if place is None or place.name or not safe_serialization:
        original(model, save_directory, max_shard_size, safe_serialization)
        return
    with collective_call(call_name("Accelerator.save_model", model)):
        size, final, root = convert_file_size_to_int(max_shard_size), Path(save_directory), place.root
        with exporting(root, final, step=accelerator.step or None) as save:
            _write_config(root, save.folder)
            manager().save_model(root, save, "full", max_shard_size=size)


def _if_planned(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: call ``function(plugin, accelerator, …)`` for an Accelerator with a planned plugin, else the original.

    A script may pass the stock plugin that it made its Accelerator with. A state dict type that it assigned is used.
    """

    @functools.wraps(function)
    def replacement(original: Callable[..., Any], fsdp_plugin: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        planned = plugins.planned_plugin(accelerator)
        if planned is None:
            return original(fsdp_plugin, accelerator, *args, **kwargs)
        kwargs.pop("use_dcp", None)  # each rank writes and reads its shards
        with plugins.with_type_of(planned, fsdp_plugin):
            return function(planned, accelerator, *args, **kwargs)

    return replacement


@_if_planned
def save_fsdp_model(
    plugin: Any, accelerator: Any, model: Any, output_dir: Any, model_index: int = 0, adapter_only: bool = False
) -> None:
    folder, save = Path(output_dir), manager().open_save(Path(output_dir))
    if save is None or model_index not in save.models:  # else the replacement of Trainer.save_model has written it
        adapters = adapter_only and is_peft_model(model)  # the Trainer asks for adapters of any model
        manager().save_model(model, save or folder, plugin.state_dict_kind, model_index, adapter_only=adapters)


@_if_planned
def load_fsdp_model(
    plugin: Any, accelerator: Any, model: Any, input_dir: Any, model_index: int = 0, adapter_only: bool = False
) -> Any:
    adapters = adapter_only and is_peft_model(model)
    folder = present_folder(input_dir, plugin.spec.checkpoint.storage)  # of the best model, it may be in a storage
    return load_model(model, folder, model_index, adapter_only=adapters, verify=plugin.spec.checkpoint.verify)


@_if_planned
def save_fsdp_optimizer(
    plugin: Any, accelerator: Any, optimizer: Any, model: Any, output_dir: Any, optimizer_index: int = 0
) -> None:
    optimizer, owner = _with_owner(accelerator, optimizer, model)
    into = manager().open_save(Path(output_dir)) or Path(output_dir)
    manager().save_optimizer(owner, optimizer, into, plugin.state_dict_kind, optimizer_index)


@_if_planned
def load_fsdp_optimizer(
    plugin: Any, accelerator: Any, optimizer: Any, model: Any, input_dir: Any, optimizer_index: int = 0, **_: Any
) -> Any:
    (optimizer, owner), verify = _with_owner(accelerator, optimizer, model), plugin.spec.checkpoint.verify
    return load_optimizer(owner, optimizer, Path(input_dir), optimizer_index, verify=verify)


def _with_owner(accelerator: Any, optimizer: Any, model: Any) -> tuple[Any, Any]:
    """Return the torch optimizer inside an ``AcceleratedOptimizer``, and the models whose parameters it has.

    Accelerate pairs models and optimizers by their positions, which is wrong for an optimizer of several models.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)
    return optimizer, owner_of(optimizer, prepared_models(accelerator)) or model
