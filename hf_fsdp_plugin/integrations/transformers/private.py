"""The private API of Transformers that this package uses; read from transformers 5.17 to 5.23.

Transformers is imported inside functions only, as ``install`` must not import it. Private methods that are replaced are
listed in :mod:`hf_fsdp_plugin.integrations.hooks` instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_fsdp_plugin.plan.names import unwrapped


def is_trainer(obj: Any) -> bool:
    return hasattr(obj, "_train_batch_size")


def hide_loading(model: Any) -> None:
    """Make a model that ``from_pretrained`` has sharded look like any other model to the constructor of a Trainer.

    The Trainer refuses checkpoints for such a model, and does not pass it to ``Accelerator.prepare``. It keeps what the
    model tells it when it is created, so :func:`show_loading` can undo this afterwards.
    """
    for module in model.modules():
        if vars(module).get("_is_distributed_loading_by_transformers"):
            module._is_distributed_loading_by_transformers = False
            module._hf_fsdp_hides_loading = True


def show_loading(model: Any) -> None:
    """Undo :func:`hide_loading`."""
    for module in model.modules():
        if vars(module).pop("_hf_fsdp_hides_loading", False):
            module._is_distributed_loading_by_transformers = True


def stored_state(model: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``state`` with the names and shapes in which Transformers stores it, for example with split experts."""
    from transformers.core_model_loading import revert_weight_conversion

    stored: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
    return stored


def run_folder(trainer: Any, trial: Any) -> Path:
    """Return the folder that contains the Trainer's checkpoints."""
    return Path(trainer._get_output_dir(trial=trial))


@contextmanager
def using_run_folder(trainer: Any, folder: Path) -> Iterator[None]:
    """Make the Trainer write its checkpoint to ``folder``. It finds no older checkpoints there, so it deletes none."""
    trainer._get_output_dir = lambda trial=None: str(folder)
    try:
        yield
    finally:
        del trainer._get_output_dir


def save_files(trainer: Any, folder: Path, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write model, config, tokenizer or processor, and arguments, with the Trainer's own method. Not collective."""
    # With a DistributedConfig, save_pretrained would ignore the state dict and gather the model, on this rank alone.
    config: Any = getattr(unwrapped(trainer.model), "config", None)
    hidden = vars(config).pop("distributed_config", None) if config is not None else None
    try:
        trainer._save(str(folder), state_dict=state_dict)
    finally:
        if hidden is not None:
            config.distributed_config = hidden


def train_batch_size(trainer: Any) -> int:
    """Return the micro-batch size per device, which ``auto_find_batch_size`` may have reduced."""
    return int(trainer._train_batch_size)
