"""Hooks of models and optimizers for scripts with their own loop and an ``Accelerator``.

After two steps, the script saves, loads and exports.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_fsdp_plugin.backends.agreement import broadcast_object
from hf_fsdp_plugin.integrations.accelerate.private import prepared_models
from hf_fsdp_plugin.integrations.preflight.after_training import skipped_calls
from hf_fsdp_plugin.integrations.preflight.comparison import Trained, check_export, differing
from hf_fsdp_plugin.integrations.preflight.run import preflight
from hf_fsdp_plugin.integrations.preflight.training import LAST_STEP, PreflightEnd
from hf_fsdp_plugin.integrations.saving import manager
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.text import format_names


class OwnLoop:
    """The steps of a script with its own loop. A Trainer begins its own run before its first forward pass."""

    def __init__(self) -> None:
        self._accelerator: Any = None
        self._began = False
        self._num_steps = 0

    def watch_model(self, accelerator: Any, model: torch.nn.Module) -> None:
        """Record the stage ``step`` from the training forwards of a prepared model on."""
        self._accelerator = accelerator
        model.register_forward_pre_hook(self._begin_step, prepend=True)

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the stage ``update`` of a prepared optimizer, and end the script after the last step."""
        optimizer.register_step_pre_hook(self._begin_update)
        optimizer.register_step_post_hook(self._end_update)

    def _begin_step(self, model: torch.nn.Module, *_: Any) -> None:
        if _is_watched() and not torch.compiler.is_compiling() and model.training and torch.is_grad_enabled():
            self._began = True
            preflight.recorder.enter("step")

    def _begin_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # torch creates the state of an optimizer, for a checkpoint, with a step whose learning rate is 0. It is no step
        # of the script. A compiled or partial model may have no forward that is seen.
        if _is_watched() and (self._began or any(group["lr"] for group in optimizer.param_groups)):
            self._began = True
            preflight.recorder.enter("update")

    def _end_update(self, *_: Any) -> None:
        if _is_watched() and self._began:
            preflight.recorder.enter("step")
            self.end_step()

    def end_step(self) -> None:
        """Count a step. After the last one, run the further stages and end the script."""
        accelerator = self._accelerator
        if accelerator is None or not accelerator.sync_gradients:
            return
        self._num_steps += 1
        if self._num_steps == LAST_STEP:
            preflight.phase = "after it"
            preflight.recorder.leave()
            preflight.recorder.mark("prepare")  # part of the stage start, because the script calls it there
            _further_stages(accelerator)
            raise PreflightEnd


def _further_stages(accelerator: Any) -> None:
    recorder, folder = preflight.recorder, preflight.folder / "out" / "checkpoint_0"
    models = prepared_models(accelerator)
    model = models[0]
    trained = Trained(_Prepared(accelerator, model))
    for stage in ("clip", "evaluate", "load best"):
        recorder.skip(stage, "the script has its own loop")
    skipped_calls("the script has its own loop")

    def save() -> None:
        trained.capture(LAST_STEP)
        accelerator.save_state(str(folder))
        manager.wait()

    def load() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        accelerator.load_state(str(folder))
        loaded = Trained(_Prepared(accelerator, model))
        loaded.capture(LAST_STEP)
        different = broadcast_object(differing(trained.weights[LAST_STEP], loaded.weights[LAST_STEP], 0.0))
        if different:
            message = f"weights differ after load_state: {format_names(different)}."
            raise SpecError([Problem(code="FSDP-E753", message=message)])

    def export() -> None:
        if len(models) > 1:
            recorder.skip_current("the script has prepared several models")
        else:
            check_export(trained, folder, LAST_STEP)

    for stage, run in (("save", save), ("resume", load), ("export", export)):
        recorder.enter(stage)
        try:
            run()
            recorder.leave()
        except Exception as error:
            preflight.failed(error)
            if not preflight.wait_for_same_failure():
                raise
            return


class _Prepared:
    """A model and its Accelerator, by the names that they have in a Trainer."""

    def __init__(self, accelerator: Any, model: Any) -> None:
        self.accelerator, self.model = accelerator, model


def _is_watched() -> bool:
    return preflight.active and preflight.phase == "script"


own_loop = OwnLoop()
"""The loop of this process."""
