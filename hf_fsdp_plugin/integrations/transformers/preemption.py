"""Checkpoints at SIGTERM with ``TrainingArguments(enable_jit_checkpoint=True)``: of the same step on all ranks.

Each rank of Transformers waits some seconds after its signal, and then saves at its own next event. Ranks with shards
that save at different steps would wait for each other without end.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from hf_fsdp_plugin.backends.ranks.agreement import any_rank
from hf_fsdp_plugin.integrations.accelerate.plugin import has_sharded_model
from hf_fsdp_plugin.integrations.transformers import private


class AgreedCheckpoint(TrainerCallback):
    """Saves a checkpoint after the step on which the ranks agree, and stops the training.

    Transformers' callback still handles the signal. Its events do nothing while this object has its manager.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._callback: Any = None
        self._manager: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()  # of an attempt with a larger batch
        callbacks = self._trainer.callback_handler.callbacks
        callback = next((each for each in callbacks if getattr(each, "jit_manager", None) is not None), None)
        if callback is not None and has_sharded_model(self._trainer.accelerator):
            self._callback, self._manager, callback.jit_manager = callback, callback.jit_manager, None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._callback is not None and any_rank(self._manager.is_checkpoint_requested):
            private.save_checkpoint(self._trainer)
            control.should_save, control.should_training_stop = False, True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (callback := self._callback) is not None:
            self.close()
            callback.on_train_end(args, state, control)  # restores the handler of the signal

    def close(self) -> None:
        """Give the manager back."""
        if self._callback is not None:
            self._callback.jit_manager = self._manager
        self._callback = None
