"""The private API of Transformers that this package uses; read from transformers 5.17 to 5.24.

Transformers is imported inside functions only, as ``install`` must not import it. Private methods that are replaced are
listed in :mod:`hf_fsdp_plugin.integrations.hooks` instead.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from hf_fsdp_plugin.contracts import Contract, contracts_of, guard_functions
from hf_fsdp_plugin.integrations.session import attributes_in_block
from hf_fsdp_plugin.observe.report import BatchShape
from hf_fsdp_plugin.plan.names import unwrapped

_TRAINER = "transformers.trainer:Trainer"
_MODEL = "transformers.modeling_utils:PreTrainedModel"
_CONVERSION = "transformers.core_model_loading"
_FILES = "the folder of a saved model"
_LOADED = "a model that `from_pretrained` has sharded"
_MARKS = ("_is_distributed_loading_by_transformers", "_device_mesh")
"""Attributes of a model that ``from_pretrained`` has sharded. The Trainer of 5.18 reads only the second."""
CONTRACTS = (
    *contracts_of(_TRAINER, "off", "the batch size in the report", "_train_batch_size"),
    *contracts_of(_TRAINER, "refused", "checkpoints of the Trainer", "_get_output_dir", "_save", "_save_checkpoint"),
    *contracts_of(_TRAINER, "refused", "resuming and the best model", "_load_from_checkpoint", "_load_best_model"),
    Contract(target="transformers.modeling_layers:_gradient_checkpointing_func", without="unobservable",
             use="the report of activation checkpointing", behavior="A checkpointed layer has this attribute."),
    *contracts_of(_MODEL, "refused", _FILES, "_keys_to_ignore_on_save", "all_tied_weights_keys"),
    *contracts_of(_MODEL, "off", "weights in fp32 with `merge --dtype bf16`", "_get_dtype_plan"),
    *contracts_of("transformers.integrations.peft:PeftAdapterMixin", "refused", _FILES, "_hf_peft_config_loaded"),
    Contract(target="transformers.distributed.mixin:_is_distributed_loading_by_transformers", without="off",
             use=_LOADED, behavior="`from_pretrained` marks a model that it has sharded.", since="5.19"),
    *contracts_of(_CONVERSION, "refused", _FILES, "revert_weight_conversion"),
)  # fmt: skip


def is_trainer(obj: Any) -> bool:
    module = sys.modules.get("transformers.trainer")
    return module is not None and isinstance(obj, module.Trainer)


def hide_loading(model: Any) -> None:
    """Make a model that ``from_pretrained`` has sharded look like any other model to the constructor of a Trainer.

    The Trainer refuses checkpoints for such a model, and does not pass it to ``Accelerator.prepare``. It reads the
    attributes of the model only in its constructor, so :func:`show_loading` can undo this afterwards.
    """
    for module in model.modules():
        if (mark := next(filter(vars(module).get, _MARKS), None)) is not None:
            vars(module).update({mark: None, "_hf_fsdp_hidden_mark": {mark: vars(module)[mark]}})


def show_loading(model: Any) -> None:
    """Undo :func:`hide_loading`."""
    for module in model.modules():
        vars(module).update(vars(module).pop("_hf_fsdp_hidden_mark", {}))


def tied_weights(model: Any) -> Mapping[str, str]:
    """Return name of each tied parameter -> name of its source."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def is_kept_in_fp32(model: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return whether a parameter with this name stays in fp32 when the model is loaded in ``dtype``, as a function."""
    from transformers.core_model_loading import build_glob_alternation

    plan = [*getattr(model, "_get_dtype_plan", lambda _: ())(dtype)]
    pattern = build_glob_alternation(plan)[0] if plan else None
    return lambda name: pattern is not None and pattern.search(name) is not None


def stored_state(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``state`` with the names and shapes in which Transformers stores it, for example with split experts."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, state)


def run_folder(trainer: Any, trial: Any) -> Path:
    """Return the folder that contains the Trainer's checkpoints."""
    return Path(trainer._get_output_dir(trial=trial))


def using_run_folder(trainer: Any, folder: Path) -> AbstractContextManager[None]:
    """Make the Trainer write its checkpoint to ``folder``. It finds no older checkpoints there, so it deletes none."""
    return attributes_in_block(trainer, _get_output_dir=lambda trial=None: str(folder))


def save_files(trainer: Any, folder: Path, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write model, config, tokenizer or processor, and arguments, with the Trainer's own method. Not collective."""
    with without_distributed_config(unwrapped(trainer.model)):
        trainer._save(str(folder), state_dict=state_dict)


def without_distributed_config(model: Any) -> AbstractContextManager[None]:
    """Let ``save_pretrained`` write a given state dict: with a ``DistributedConfig`` it would gather the model."""
    config: Any = getattr(model, "config", None)
    is_sharded = config is not None and "distributed_config" in vars(config)
    return attributes_in_block(config, distributed_config=None) if is_sharded else nullcontext()


def overrides_save(trainer: Any) -> bool:
    """Return whether the Trainer's class writes model, config and so on with its own method."""
    from transformers import Trainer

    return type(trainer)._save is not Trainer._save


def has_own_checkpoints(trainer: Any) -> bool:
    """Return whether the Trainer's class has a method for whole checkpoints that calls none of its base classes."""
    from transformers import Trainer

    for cls in type(trainer).__mro__[: type(trainer).__mro__.index(Trainer)]:
        method = inspect.unwrap(vars(cls).get("_save_checkpoint", Trainer._save_checkpoint))
        names = getattr(getattr(method, "__code__", None), "co_names", ("_save_checkpoint",))
        if method is not inspect.unwrap(Trainer._save_checkpoint) and "_save_checkpoint" not in names:
            return True
    return False


def saving_own_checkpoints(trainer: Any, save: Callable[..., None]) -> AbstractContextManager[Any]:
    """Run ``save(method, trainer, model, trial)`` in place of a method of the Trainer's class for whole checkpoints."""
    if not has_own_checkpoints(trainer):
        return nullcontext()
    return attributes_in_block(trainer, _save_checkpoint=functools.partial(save, trainer._save_checkpoint, trainer))


def loading_sharded_models(trainer: Any, load_other: Callable[[Any, Any, Path], bool]) -> AbstractContextManager[None]:
    """Load checkpoints with the Trainer's own methods, which load shards, instead of the methods of a subclass.

    Args:
        load_other: loads the model of a checkpoint for which the Trainer's method does not call ``load_fsdp_model``,
            and returns whether it has. The method would read whole files on each rank, or find no weights.
    """
    from transformers import Trainer

    load = Trainer._load_from_checkpoint.__get__(trainer)

    def load_from_checkpoint(resume_from_checkpoint: str, model: Any = None) -> None:
        if not load_other(trainer, trainer.model if model is None else model, Path(resume_from_checkpoint)):
            load(resume_from_checkpoint, model)

    best = Trainer._load_best_model.__get__(trainer)
    return attributes_in_block(trainer, _load_from_checkpoint=load_from_checkpoint, _load_best_model=best)


def train_batch_size(trainer: Any) -> int:
    """Return the micro-batch size per device, which ``auto_find_batch_size`` may have reduced."""
    return int(getattr(trainer, "_train_batch_size", trainer.args.train_batch_size))


def trainer_batch(trainer: Any) -> BatchShape:
    """Return the input of one optimizer step of a Trainer."""
    per_device = train_batch_size(trainer)
    if trainer.accelerator.split_batches:
        per_device //= trainer.accelerator.num_processes
    return BatchShape(per_device=per_device, accumulation=trainer.args.gradient_accumulation_steps)


def ignored_on_save(model: Any) -> tuple[str, ...]:
    """Return the names of the weights that ``save_pretrained`` does not store."""
    return tuple(getattr(model, "_keys_to_ignore_on_save", None) or ())


def has_adapters(model: Any) -> bool:
    """Return whether adapters were added with ``add_adapter``; then only these are stored."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def is_quantized(model: Any) -> bool:
    return getattr(model, "hf_quantizer", None) is not None


def save_checkpoint(trainer: Any) -> None:
    """Write a checkpoint after the present step. Collective."""
    trainer._save_checkpoint(trainer.model, trial=None)


guard_functions(globals(), CONTRACTS)
