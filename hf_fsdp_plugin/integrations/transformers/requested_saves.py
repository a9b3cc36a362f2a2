"""Checkpoints on request in a Trainer: of the same step on all ranks, after SIGTERM, SIGUSR1 or the file ``save_now``.

With ``TrainingArguments(enable_jit_checkpoint=True)``, each rank of Transformers waits some seconds after its SIGTERM,
and then saves at its own next event. Ranks with shards that save at different steps would wait for each other without
end.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hf_fsdp_plugin.checkpoint.names import TRAINER_PREFIX
from hf_fsdp_plugin.integrations.accelerate.plugin import has_sharded_model, planned_plugin
from hf_fsdp_plugin.integrations.save_requests import SaveRequest, SaveRequests
from hf_fsdp_plugin.integrations.transformers import private


class AgreedCheckpoint(TrainerCallback):
    """Saves a checkpoint after the event on which the ranks agree: a step, or a batch of an evaluation.

    After a signal the ranks exit (``SystemExit``); with ``enable_jit_checkpoint`` the training stops; after the file
    it goes on. Transformers' callback still handles its signal, but its events do nothing while this object has its
    manager.

    Attributes:
        has_exited: whether the ranks exit after a save.
    """

    def __init__(self, trainer: Any) -> None:
        self.has_exited = False
        self._trainer = trainer
        self._callback: Any = None
        self._manager: Any = None
        self._requests: SaveRequests | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()  # of an attempt with a larger batch
        if not has_sharded_model(self._trainer.accelerator):
            return
        callbacks = self._trainer.callback_handler.callbacks
        callback = next((each for each in callbacks if getattr(each, "jit_manager", None) is not None), None)
        if callback is not None:
            self._callback, self._manager, callback.jit_manager = callback, callback.jit_manager, None
        plugin = planned_plugin(self._trainer.accelerator)
        self._requests = SaveRequests(plugin, Path(args.output_dir), self._find_jit_request)

    def _find_jit_request(self) -> str:
        if self._manager is None or not self._manager.is_checkpoint_requested:
            return ""
        return str(SaveRequest(text="SIGTERM with enable_jit_checkpoint", time=time.time(), ends=True))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._requests is not None and (due := self._requests.due()) is not None:
            self._save(self._requests, due, state, control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # An evaluation may last longer than the time that a signal leaves. The file can wait for the next step.
        if self._requests is not None and (due := self._requests.due()) is not None and due.ends:
            self._save(self._requests, due, state, control)

    def _save(self, requests: SaveRequests, due: SaveRequest, state: Any, control: Any) -> None:
        control.should_save = False  # this is the checkpoint of this step
        if due.ends:
            control.should_evaluate, control.should_training_stop = False, True
        private.save_checkpoint(self._trainer)
        self.has_exited = bool(due.exit_code)
        requests.finish(f"{TRAINER_PREFIX}{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        callback = self._callback
        self.close()
        if callback is not None:
            callback.on_train_end(args, state, control)  # restores the handler of the signal

    def close(self) -> None:
        """Stop looking for requests, and give the manager back."""
        if self._requests is not None:
            self._requests.close()
        if self._callback is not None:
            self._callback.jit_manager = self._manager
        self._callback = self._requests = self._manager = None
