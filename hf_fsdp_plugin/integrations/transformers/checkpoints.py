"""The Trainer's checkpoints: staged, complete, and resumed wherever they came from.

Functions around the Trainer's own methods, as in :mod:`hf_fsdp_plugin.integrations.transformers.trainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from hf_fsdp_plugin.backends.agreement import on_all_ranks
from hf_fsdp_plugin.checkpoint.checking.completeness import newest_complete
from hf_fsdp_plugin.checkpoint.shards import model_shards
from hf_fsdp_plugin.checkpoint.writing import save as saves
from hf_fsdp_plugin.checkpoint.writing import state_files
from hf_fsdp_plugin.checkpoint.writing.staging import remove, settle, settle_all
from hf_fsdp_plugin.devices import available_device
from hf_fsdp_plugin.integrations.accelerate.prepare import planned_plugin
from hf_fsdp_plugin.integrations.messages import tell
from hf_fsdp_plugin.integrations.resuming import check_complete, tell_differences, tell_passed_over
from hf_fsdp_plugin.integrations.saving import manifest, saving
from hf_fsdp_plugin.plan.names import canonical_name, unwrapped
from hf_fsdp_plugin.problems import CheckpointError, Problem

PREFIX = f"{PREFIX_CHECKPOINT_DIR}-"
_NAME_ANOTHER = "Name a complete checkpoint, or pass resume_from_checkpoint=True for the newest one."


def save_checkpoint(original: Callable[..., None], trainer: Any, model: Any, trial: Any = None) -> None:
    """The Trainer writes into a staging folder; the checkpoint is renamed into its place when it is whole."""
    plugin = planned_plugin(trainer.accelerator)
    if plugin is None or not trainer.accelerator._models:
        original(model, trial)
        return
    arguments = trainer.args
    run = Path(trainer._get_output_dir(trial=trial))
    final = run / f"{PREFIX}{trainer.state.global_step}"
    # What is pushed has to be there when the Trainer's method ends.
    asynchronous = plugin.spec.checkpoint.asynchronous and not arguments.push_to_hub
    with saving(final, asynchronous=asynchronous) as save:
        with _writing_to(trainer, save.staging.root):
            original(model, trial)
        _name_best(trainer, staged=save.folder, final=final)
    facts = manifest(
        trainer.model,
        plugin.state_dict_kind,
        step=trainer.state.global_step,
        asynchronous=asynchronous,
        batch=_batch(trainer),
    )
    save.finish(facts, after=lambda: _rotate(trainer, run, final))


@contextmanager
def _writing_to(trainer: Any, folder: Path) -> Iterator[None]:
    """The Trainer's run folder is ``folder``; it finds no older checkpoint there, and so removes none."""
    trainer._get_output_dir = lambda trial=None: str(folder)
    try:
        yield
    finally:
        del trainer._get_output_dir


def _name_best(trainer: Any, *, staged: Path, final: Path) -> None:
    """The best checkpoint by the name that it will have."""
    state = trainer.state
    if state.best_model_checkpoint == str(staged):
        state.best_model_checkpoint = str(final)
        if trainer.args.should_save:
            state.save_to_json(str(staged / "trainer_state.json"))


def _rotate(trainer: Any, run: Path, newest: Path) -> None:
    """As the Trainer does it, but that a checkpoint is never there in part.

    A removal that was cut off would leave a folder with a recent date, which outlives a whole checkpoint.
    """
    from transformers.trainer_utils import sort_checkpoints

    limit, best = trainer.args.save_total_limit, trainer.state.best_model_checkpoint
    if limit is None or limit <= 0:
        return
    protected = {newest} | ({Path(best)} if best is not None else set())
    # By date: a run that begins anew in an old one's folder has lower numbers.
    checkpoints = [Path(path) for path in sort_checkpoints(str(run), use_mtime=True)]
    num_to_remove = max(len(checkpoints) - max(limit, len(protected)), 0)
    for path in [path for path in checkpoints if path not in protected][:num_to_remove]:
        remove(path)


def _batch(trainer: Any) -> dict[str, Any]:
    arguments = trainer.args
    per_step = trainer._train_batch_size * arguments.gradient_accumulation_steps * dist.get_world_size()
    return {
        "per_device": trainer._train_batch_size,
        "accumulation": arguments.gradient_accumulation_steps,
        "world_size": dist.get_world_size(),
        "samples_per_step": per_step,
        "seed": arguments.seed,
        "data_seed": arguments.data_seed,
    }


def save_model(
    original: Callable[..., Any], trainer: Any, output_dir: str | None = None, _internal_call: bool = False
) -> Any:
    """A checkpoint's model with everything that makes it usable; called by a user, a folder for ``from_pretrained``."""
    plugin = planned_plugin(trainer.accelerator)
    if plugin is None or not trainer.accelerator._models:
        return original(output_dir, _internal_call)
    folder = Path(output_dir if output_dir is not None else trainer.args.output_dir)
    if saves.open_save(folder) is not None:
        _write_companions(trainer, folder)
        adapters, kind = _is_peft(trainer), plugin.state_dict_kind
        if adapters and kind == "full":
            kind = "sharded"  # whole they are there already, in PEFT's file, and a model.safetensors would mislead
        state_files.save_model(trainer.model, folder, kind, adapter_only=adapters)
        return None
    _export(original, trainer, folder)
    if trainer.args.push_to_hub and not _internal_call:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)
    return None


def _export(original: Callable[..., Any], trainer: Any, folder: Path) -> None:
    """A Hugging Face folder, written by all ranks side by side."""
    plugin = planned_plugin(trainer.accelerator)
    assert plugin is not None
    if _needs_whole_weights(trainer):
        kind = plugin.state_dict_kind
        plugin.set_state_dict_type("full")
        try:
            original(str(folder), True)
        finally:
            plugin.set_state_dict_type(kind)
        return
    with saving(folder, into=True) as save:
        _write_companions(trainer, save.folder)
        if not _is_peft(trainer):
            state_files.save_model(trainer.model, save.folder, "full")
    save.finish(manifest(trainer.model, "full", step=trainer.state.global_step, batch=_batch(trainer)))


def _write_companions(trainer: Any, folder: Path) -> None:
    """Config, generation config, tokenizer or processor, arguments: the Trainer's own method, without weights.

    Adapters are small, and written whole: PEFT's format is what they are used by. Collective.
    """
    adapters = state_files.trainable_state(trainer.model) if _is_peft(trainer) else None
    with on_all_ranks(f"writing {folder}"):
        if not trainer.args.should_save:
            return
        if adapters is not None:
            trainer._save(str(folder), state_dict=_under_live_names(adapters, unwrapped(trainer.model)))
            _clean_names(folder)
        else:
            with _without_progress_bar():
                trainer._save(str(folder), state_dict={})
            # What the methods of Transformers make of no weights.
            (folder / "model.safetensors").unlink(missing_ok=True)


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Transformers would show one of no weights."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _under_live_names(state: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """PEFT looks for its layers' parameters under the names that its modules have now, FSDP1's wrappers included."""
    live = {canonical_name(name): name for name, _ in model.named_modules()}
    named = {}
    for name, tensor in state.items():
        module, _, parameter = name.rpartition(".")
        named[f"{live[module]}.{parameter}" if live.get(module) else name] = tensor
    return named


def _clean_names(folder: Path) -> None:
    """Without wrappers in any name, as whoever loads an adapter expects them."""
    from safetensors.torch import load_file, save_file

    for path in folder.rglob("adapter_model.safetensors"):
        state = load_file(path)
        clean = {canonical_name(name): tensor for name, tensor in state.items()}
        if clean.keys() != state.keys():
            save_file(clean, path, metadata={"format": "pt"})


def _is_peft(trainer: Any) -> bool:
    from accelerate.utils.modeling import is_peft_model

    return bool(is_peft_model(trainer.model))


def _needs_whole_weights(trainer: Any) -> bool:
    """Whether Transformers stores this model under other names or in other pieces than it computes with.

    Fused experts are such a case. Turning them back takes whole tensors, so rank 0 gathers them, as it always did.
    """
    if _is_peft(trainer):
        return False
    inner: Any = unwrapped(trainer.model)
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # Transformers without conversions
        return False
    shards = model_shards(trainer.model)
    on_meta = {held.name: torch.empty(held.shape, dtype=held.dtype, device="meta") for held in shards.tensors}
    try:
        stored = revert_weight_conversion(inner, dict(on_meta))
    except Exception:  # a conversion that computes with the values
        return True
    return {name: tensor.shape for name, tensor in stored.items()} != {n: t.shape for n, t in on_meta.items()}


def load_best_model(original: Callable[[], Any], trainer: Any) -> Any:
    if planned_plugin(trainer.accelerator) is not None:
        saves.wait()
    return original()


def finalize_training(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """The training ends when its last checkpoint is in its place: the Trainer then looks at all of them."""
    if planned_plugin(trainer.accelerator) is not None:
        saves.wait()
    return original(*args, **kwargs)


def checkpoint_to_resume(trainer: Any, asked: Any) -> Any:
    """What ``resume_from_checkpoint`` comes to: the newest complete checkpoint, or the one that was named.

    Raises:
        CheckpointError: it is incomplete, or all of them are.
    """
    run = Path(trainer.args.output_dir)
    with on_all_ranks("looking for a checkpoint"):
        if dist.get_rank() == 0:
            settle_all(run, PREFIX)
            if not isinstance(asked, bool):
                settle(Path(asked))
    with on_all_ranks("looking for a checkpoint"):
        if asked is not True:
            check_complete(Path(asked), "resumed from", _NAME_ANOTHER)
            return asked
        found, passed_over = newest_complete(run, PREFIX)
        tell_passed_over(passed_over)
        if found is None:
            if passed_over:
                raise CheckpointError([_none_complete(run, len(passed_over))])
            return True  # for the Trainer's own words
        tell(f"resuming from {found}, the newest complete checkpoint.")
        return str(found)


def _none_complete(run: Path, number: int) -> Problem:
    return Problem(
        severity="error",
        message=f"none of the {number} checkpoints in {run} is complete.",
        fix="Fetch one from where it was copied to, or start without resume_from_checkpoint.",
    )


def load_rng_state(original: Callable[..., None], trainer: Any, checkpoint: str | None) -> None:
    """The Trainer's own way, and a word where the random numbers or the data cannot be the same."""
    if planned_plugin(trainer.accelerator) is not None and checkpoint is not None:
        tell_differences(Path(checkpoint), _batch(trainer))
        saved_by_one, mine = Path(checkpoint) / "rng_state.pth", Path(checkpoint) / "rng_state_0.pth"
        if dist.get_rank() == 0 and saved_by_one.exists() != mine.exists():
            _load_rng(trainer, saved_by_one if saved_by_one.exists() else mine)
            return
    original(checkpoint)


def _load_rng(trainer: Any, path: Path) -> None:
    """Between one rank and several the file has another name."""
    import random

    import numpy as np
    from transformers.trainer_pt_utils import safe_globals

    with safe_globals():
        state = torch.load(path, weights_only=True)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["cpu"])
    device = available_device()
    if device.type != "cpu" and device.type in state:
        saved = state[device.type]
        device.set_rng_state(saved[0] if isinstance(saved, list) else saved)
