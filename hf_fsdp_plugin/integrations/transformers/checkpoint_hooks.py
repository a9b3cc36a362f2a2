"""Replacements of the Trainer's methods that write and read checkpoints."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.utils.modeling import is_peft_model
from transformers.trainer_utils import has_length

from hf_fsdp_plugin.backends.ranks.agreement import TRAINING_LIMIT, collective_call, on_all_ranks, wait_for_all_ranks
from hf_fsdp_plugin.backends.sharding.shard import locate_module
from hf_fsdp_plugin.checkpoint.checking.completeness import by_number, check_trainer_checkpoint
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, stored_state_dict_type
from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest
from hf_fsdp_plugin.checkpoint.names import (
    HF_MODEL,
    HF_MODEL_BIN,
    MANIFEST_NAME,
    TRAINER_PREFIX,
    TRAINER_SCHEDULE,
    TRAINER_STATE,
    index_file,
    safetensors_file,
    trainer_rng_file,
)
from hf_fsdp_plugin.checkpoint.reading.optimizer import schedules_follow_groups
from hf_fsdp_plugin.checkpoint.reading.pickled_states import load_state_file
from hf_fsdp_plugin.checkpoint.reading.resharding import load_model
from hf_fsdp_plugin.checkpoint.saved_state import model_shards
from hf_fsdp_plugin.checkpoint.storage import Storage
from hf_fsdp_plugin.checkpoint.writing.state_files import manifest_of
from hf_fsdp_plugin.integrations import peft, resuming
from hf_fsdp_plugin.integrations.accelerate.checkpoint_hooks import load_fsdp_optimizer
from hf_fsdp_plugin.integrations.accelerate.plugin import PlannedFsdpPlugin, has_sharded_model, if_planned, if_sharded
from hf_fsdp_plugin.integrations.samples import batch_facts, kept_accumulation
from hf_fsdp_plugin.integrations.saving import gathered, manager, remove_oldest, remove_stale_weights
from hf_fsdp_plugin.integrations.session import attributes_in_block, current_run, session
from hf_fsdp_plugin.integrations.transformers import model_files, private
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.observers import mark_phase
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.spec.fsdp_spec import StateDictKind


@if_sharded
@mark_phase("checkpoint")
def save_checkpoint(original: Callable[..., None], trainer: Any, model: Any, trial: Any = None) -> None:
    """Make the Trainer write to a staging folder, which is renamed when the checkpoint is complete. Collective.

    A method of the Trainer's class that does not call that of Transformers computes the path of the checkpoint itself:
    the path is a link to the staging folder meanwhile.
    """
    plugin: PlannedFsdpPlugin = trainer.accelerator.state.fsdp_plugin
    run = private.run_folder(trainer, trial)
    final = run / f"{TRAINER_PREFIX}{trainer.state.global_step}"
    if manager().open_save(final) is not None:  # in such a method
        original(model, trial)
        return
    is_own = private.has_own_checkpoints(trainer)
    # A checkpoint that is pushed to the Hub has to be complete when the Trainer's method returns.
    asynchronous = plugin.spec.checkpoint.asynchronous and not trainer.args.push_to_hub
    wait_for_all_ranks(
        f"a checkpoint of {type(trainer).__name__} after step {trainer.state.global_step}",
        fix="Set `control.should_save` on all ranks, not only on `state.is_world_process_zero`.",
        limit=TRAINING_LIMIT,
    )

    def manifest() -> Manifest:
        facts: dict[str, Any] = {"batch": _batch(trainer), "run": resuming.run_fact()}
        facts |= {"step": trainer.state.global_step, "adapter_only": is_peft_model(trainer.model)}
        facts |= {"parameters": save.parameters(trainer.model)}
        return manifest_of(trainer.model, _kind_of_checkpoints(trainer) if save.models else "full", **facts)

    storage = plugin.spec.checkpoint.storage
    if storage and is_own:
        message = f"{type(trainer).__name__} computes the paths of its checkpoints itself: they are not uploaded."
        fix = "Call super()._save_checkpoint(model, trial) in the class, and add files to its folder before."
        print_once(Problem(code="FSDP-W429", message=message, fix=fix))
        storage = ""

    def rotate() -> None:
        limit, best = trainer.args.save_total_limit, trainer.state.best_model_checkpoint
        remove_oldest(final, TRAINER_PREFIX, limit, storage, best)

    options: dict[str, Any] = {"asynchronous": asynchronous, "linked": is_own, "storage": storage, "after": rotate}
    with manager().saving(final, manifest, **options) as save:
        with nullcontext() if is_own else private.using_run_folder(trainer, save.staging.root):
            original(model, trial)
        if trainer.state.best_model_checkpoint == str(save.folder):
            trainer.state.best_model_checkpoint = str(final)
            if trainer.args.should_save:
                trainer.state.save_to_json(str(save.folder / TRAINER_STATE))


def _kind_of_checkpoints(trainer: Any) -> StateDictKind:
    """Return the state dict type of checkpoints. Those without optimizer state are loaded with `from_pretrained`."""
    plugin = trainer.accelerator.state.fsdp_plugin
    kind: StateDictKind = plugin.state_dict_kind
    if trainer.args.save_only_model and kind != "full" and not plugin.spec.checkpoint.storage:
        plugin.state_dict_reason = "save_only_model=True writes whole weights, which from_pretrained loads"
        return "full"
    return kind


def _batch(trainer: Any) -> dict[str, Any]:
    """Return the batch sizes and seeds for the manifest, and reasons why steps depend on the accumulation."""
    arguments = trainer.args
    per_device, accumulation = private.train_batch_size(trainer), arguments.gradient_accumulation_steps
    is_split = trainer.accelerator.split_batches  # then all ranks share one batch
    samples = per_device * accumulation if is_split else trainer.get_total_train_batch_size(arguments)
    batch = {**batch_facts(accumulation, samples), "per_device": per_device}
    batch |= {"seed": arguments.seed, "data_seed": arguments.data_seed}
    loader = trainer.callback_handler.train_dataloader
    if loader is not None and has_length(loader):
        batch["steps_per_epoch"] = math.ceil(len(loader) / accumulation)
    depends = []
    if arguments.train_sampling_strategy == "group_by_length":
        depends.append("group_by_length sorts samples in groups whose size depends on the gradient accumulation")
    if trainer.model_accepts_loss_kwargs and not arguments.average_tokens_across_devices:
        depends.append("average_tokens_across_devices=False averages the loss of each rank's tokens separately")
    return {**batch, "depends_on_accumulation": depends} if depends else batch


def _keep_samples_per_step(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Change the gradient accumulation after a restart, so that a step has as many samples as in the first attempt."""
    arguments, now = trainer.args, _batch(trainer)
    if arguments.auto_find_batch_size and "per_device" in saved:  # the Trainer continues with the saved batch size
        now["samples_per_step"] = now["samples_per_step"] * saved["per_device"] // now["per_device"]
    arguments.gradient_accumulation_steps = kept_accumulation(saved, now)


@if_sharded
def save_model(
    original: Callable[..., Any], trainer: Any, output_dir: str | None = None, _internal_call: bool = False
) -> Any:
    """Write the model and its companions to an open checkpoint or a Hugging Face folder. Collective."""
    folder = Path(output_dir if output_dir is not None else trainer.args.output_dir)
    if (save := manager().open_save(folder)) is not None:
        _write_companions(trainer, save.folder)
        kind, adapters = _kind_of_checkpoints(trainer), model_files.stores_adapters(unwrapped(trainer.model))
        if kind == "full" and (adapters or private.overrides_save(trainer)):
            kind = "sharded"  # the file for `from_pretrained` is written by PEFT, or by the Trainer's own method
            writer = "PEFT" if adapters else f"{type(trainer).__name__}._save"
            plugin = trainer.accelerator.state.fsdp_plugin
            plugin.state_dict_reason = f"{writer} writes the whole file, and the shards are written beside it"
        manager().save_model(trainer.model, save, kind, adapter_only=is_peft_model(trainer.model))
        return None
    with collective_call(f"save_model of {type(trainer).__name__}"):
        _export(trainer, folder)
        if _internal_call and output_dir is not None:
            _expect_more_files(trainer, folder)
    if trainer.args.push_to_hub and not _internal_call:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)
    return None


def _expect_more_files(trainer: Any, folder: Path) -> None:
    """Remove the manifest of a model that a method of the Trainer's class saves as the first part of a checkpoint.

    The manifest would not list the other parts, with which a resume would refuse the checkpoint. Collective.
    """
    with on_all_ranks(f"writing {folder}"):
        if dist.get_rank() == 0:
            (folder / MANIFEST_NAME).unlink(missing_ok=True)
    message = f"{type(trainer).__name__} writes the files of {folder.name} one after the other: an interrupted save "
    message += "leaves an incomplete folder. It has no manifest, so that its bytes cannot be verified."
    fix = "Call super()._save_checkpoint(model, trial) in the class, and add files to its folder afterwards."
    print_once(Problem(code="FSDP-W409", message=message, fix=fix))


def _export(trainer: Any, folder: Path) -> None:
    """Write a Hugging Face folder. Every rank writes its shards, except for models that Transformers converts."""
    model, adapters = trainer.model, model_files.stores_adapters(unwrapped(trainer.model))
    is_converted = not adapters and model_files.is_stored_differently(unwrapped(model), model_shards(model))
    if is_converted or private.overrides_save(trainer):
        _save_on_rank_0(trainer, folder)
        return

    def manifest() -> Manifest:
        found = manifest_of(model, "full", step=trainer.state.global_step, batch=_batch(trainer))
        return replace(found, parameters=_adapter_parameters(save.folder), ties=()) if adapters else found

    with manager().saving(folder, manifest, into=True, after=partial(remove_stale_weights, folder)) as save:
        _write_companions(trainer, save.folder)
        if not adapters:
            manager().save_model(model, save, "full")


def _write_companions(trainer: Any, folder: Path) -> None:
    """Write config, generation config, tokenizer or processor, and arguments. Collective.

    Of the weights, only PEFT's adapters are written: they are small, and PEFT loads them only from its own format.
    If the Trainer's class has its own method for these files, the method also writes the whole weights in its own
    format: the model is gathered on rank 0 for it.
    """
    if private.overrides_save(trainer):
        _save_on_rank_0(trainer, folder)
        return
    inner = unwrapped(trainer.model)
    has_adapters = model_files.stores_adapters(inner)
    state = peft.adapter_state(trainer.model, model_shards(trainer.model)) if has_adapters else {}
    with on_all_ranks(f"writing {folder}"), attributes_in_block(gathered(), paused=True):
        if not trainer.args.should_save:
            return
        with peft.as_unsharded(inner, state) if has_adapters else model_files.without_progress_bar():
            private.save_files(trainer, folder, state)
        if not has_adapters:  # Transformers writes a file even for an empty state dict.
            (folder / safetensors_file(HF_MODEL)).unlink(missing_ok=True)


def _save_on_rank_0(trainer: Any, folder: Path) -> None:
    """Write the whole weights and their companions with the Trainer's method for one process. Collective."""
    place = locate_module(trainer.model)
    assert place is not None, "the replacement is for sharded models"
    with gathered().on_rank_0(place) as writes, on_all_ranks(f"writing {folder}"):
        if writes:
            with _linked_run_folder(folder):
                private.save_files(trainer, folder, gathered().state_of(trainer.model) or {})


@contextmanager
def _linked_run_folder(folder: Path) -> Iterator[None]:
    """Link the entries of the run's folder beside a checkpoint that is being written.

    A method of a Trainer's class may read or copy files beside the checkpoint, whose parent is a staging folder.
    Entries that the method writes there are moved to the run's folder. A folder that is not staged is not changed.
    """
    save, staging = manager().open_save(folder), folder.parent
    if save is None or save.staging.root != staging:
        yield
        return
    run, before = save.staging.final.parent, set(staging.iterdir())
    links = [staging / entry.name for entry in run.iterdir() if not entry.name.startswith(".")]
    links = [link for link in links if not link.exists()]
    for link in links:
        link.symlink_to((run / link.name).absolute(), target_is_directory=(run / link.name).is_dir())
    try:
        yield
    finally:
        for link in links:
            if link.is_symlink():
                link.unlink()
        for entry in set(staging.iterdir()) - before:
            entry.replace(run / entry.name)


def _adapter_parameters(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of the adapters in a folder, by the names that PEFT gives them there. Collective."""
    with on_all_ranks(f"reading {folder}"):
        if dist.get_rank() != 0 or stored_state_dict_type(folder) is None:
            return {}
        return {name: (tensor.dtype, tensor.shape) for name, tensor in read_stored_model(folder).tensors.items()}


@if_planned
def finalize_training(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Wait for the last save, because the Trainer then loads the best checkpoint and may delete others."""
    manager().wait()
    return original(*args, **kwargs)


def get_last_checkpoint(original: Callable[..., Any], folder: Any) -> Any:
    """Return the path that the newest checkpoint of a storage would have in a folder. ``train`` resumes from it."""
    if storage := session().storage():
        for name in by_number(Storage(storage).checkpoints(), TRAINER_PREFIX)[:1]:
            return os.path.join(folder, name)
    return original(folder)


def checkpoint_to_resume(trainer: Any, resume: Any) -> Any:
    """Return the checkpoint that ``resume_from_checkpoint=resume`` selects; for ``True``, the newest complete one.

    After a restart, this is the newest complete checkpoint that the run has written, whatever the script selects.
    Return ``True`` if there is no checkpoint at all, so that the Trainer raises its own error. Collective.

    Raises:
        CheckpointError: the selected checkpoint is incomplete, or all checkpoints are.
    """
    current_run().first_samples_per_step = None  # of an earlier training in this script
    setting = trainer.accelerator.state.fsdp_plugin.spec.checkpoint
    run = Path(trainer.args.output_dir)
    if (own := resuming.checkpoint_after_restart(run, TRAINER_PREFIX, setting.storage)) is not None:
        if saved := resuming.continue_run(own):
            _keep_samples_per_step(trainer, saved)
        _check_contents(trainer, own)
        return str(own)
    if not resume:
        return resume
    selected = None if resume is True else os.fspath(resume)
    fix = "Pass a complete checkpoint, or resume_from_checkpoint=True for the newest one."
    found = resuming.find_checkpoint(run, TRAINER_PREFIX, selected, setting, fix=fix)
    if found is None:
        return resume
    _check_contents(trainer, found)
    if resume is not True:
        return str(found)
    print_once(f"resuming from {found}, the newest complete checkpoint.")
    return str(found)


def _check_contents(trainer: Any, checkpoint: Path) -> None:
    """Check that a checkpoint has what the Trainer continues with, of which it skips what is missing. Collective."""
    check = partial(check_trainer_checkpoint, checkpoint, model_only=trainer.args.save_only_model)
    if (warning := resuming.on_rank_0(check)) is not None:
        print_once(warning)


def load_other_model(trainer: Any, model: Any, checkpoint: Path) -> bool:
    """Load a model for which the Trainer does not call ``load_fsdp_model``, as it does for shards and a single file.

    These are the files of a full state dict above 50 GB. Collective.

    Returns:
        Whether the checkpoint has such a model. If not, nothing was loaded.
    """
    if not has_sharded_model(trainer.accelerator) or is_peft_model(model):
        return False
    indexes = (index_file(safetensors_file(HF_MODEL)), index_file(f"{HF_MODEL_BIN}.bin"))
    if not any((checkpoint / name).is_file() for name in indexes):
        return False
    load_model(model, checkpoint, verify=trainer.accelerator.state.fsdp_plugin.spec.checkpoint.verify)
    return True


@if_planned
def load_optimizer_and_scheduler(original: Callable[..., None], trainer: Any, checkpoint: str | None) -> None:
    """Load both, also if the groups of the optimizer were others when saved."""
    scheduler = trainer.lr_scheduler
    saved = Path(checkpoint or "") / TRAINER_SCHEDULE
    with schedules_follow_groups([getattr(scheduler, "scheduler", scheduler)]):
        if checkpoint is None or not saved.is_file():
            original(checkpoint)  # a model only
            return
        plugin = trainer.accelerator.state.fsdp_plugin
        load_fsdp_optimizer(original, plugin, trainer.accelerator, trainer.optimizer, trainer.model, checkpoint)
        scheduler.load_state_dict(load_state_file(saved))


@if_planned
def load_rng_state(original: Callable[..., None], trainer: Any, checkpoint: str | None) -> None:
    """Load the RNG state, and report whether random numbers or data differ from the uninterrupted run."""
    if checkpoint is None:
        original(checkpoint)
        return
    resuming.warn_differences(Path(checkpoint), _batch(trainer))
    # The Trainer's file has different names for a single rank and for rank 0 of several ranks.
    single, first = Path(checkpoint) / trainer_rng_file(None), Path(checkpoint) / trainer_rng_file(0)
    mine, other = (single, first) if dist.get_world_size() == 1 else (first, single)
    if dist.get_rank() == 0 and other.exists() and not mine.exists():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / mine.name).symlink_to(other.absolute())
            original(folder)
    else:
        original(checkpoint)
