"""Logs norms and histograms of whole weights and gradients in a Trainer.

Turns off the same in ``wandb.watch``, which would log the shards of one rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_fsdp_plugin.backends.sharding.shard import locate_module
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.observe.weight_statistics import TensorStatistics, weight_statistics
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import Problem


class WeightStatistics(TrainerCallback):
    """Logs the norms of the whole weights and gradients of each unit at some steps, with histograms.

    The norms are figures of the Trainer's log, ``weights/model.layers.0_norm`` and ``gradients/model.layers.0_norm``,
    so that every logger of ``report_to`` has them. Histograms are given to Weights & Biases and TensorBoard if they are
    used. The gradients are those of the step, after clipping, and the weights those before it.

    Example::

        trainer.add_callback(hfp.WeightStatistics(trainer, every=100))

    Args:
        trainer: the Trainer whose log is used.
        every: number of optimizer steps from one log to the next.
        bins: number of bins of each histogram; 0 for norms only.
        by_unit: of each FSDP unit; if false, of each parameter.
    """

    def __init__(self, trainer: Trainer, every: int = 100, bins: int = 64, by_unit: bool = True) -> None:
        self._trainer, self._every, self._bins, self._by_unit = trainer, every, bins, by_unit
        self._found: dict[str, TensorStatistics] = {}

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if (state.global_step + 1) % self._every == 0:
            for kind in ("weights", "gradients"):
                found = weight_statistics(
                    kwargs["model"], gradients=kind == "gradients", bins=self._bins, by_unit=self._by_unit
                )
                self._found |= {f"{kind}/{name}": each for name, each in found.items()}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if found := self._found:
            self._found = {}
            if self._bins:
                self._log_histograms(found, state.global_step)
            should_log = control.should_log
            self._trainer.log({f"{name}_norm": each.norm for name, each in found.items()})
            control.should_log = should_log  # the Trainer's own log of this step is still to come

    def _log_histograms(self, found: dict[str, TensorStatistics], step: int) -> None:
        """Give the histograms to the loggers of this process: rank 0 has them."""
        wandb = sys.modules.get("wandb")
        if wandb is not None and wandb.run is not None:
            histograms = {name: wandb.Histogram(np_histogram=(each.counts, each.edges)) for name, each in found.items()}
            wandb.run.log(histograms, commit=False)  # the log of the norms commits it
        for callback in self._trainer.callback_handler.callbacks:
            if (writer := getattr(callback, "tb_writer", None)) is not None:
                for name, each in found.items():
                    writer.add_histogram_raw(
                        name, min=each.minimum, max=each.maximum, num=sum(each.counts),
                        sum=each.mean * each.num_elements, sum_squares=each.norm**2, bucket_limits=each.edges[1:],
                        bucket_counts=each.counts, global_step=step,
                    )  # fmt: skip


def watch(
    original: Callable[..., Any],
    run: Any,
    models: Any,
    criterion: Any = None,
    log: Any = "gradients",
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Let ``wandb.watch`` log no weights and gradients of a sharded model, of which each rank has a part."""
    given = models if isinstance(models, (list, tuple)) else [models]
    sharded = [type(unwrapped(model)).__name__ for model in given if locate_module(model) is not None]
    if sharded and log is not None:
        message = f"wandb.watch logs no weights and gradients of {sharded[0]}: each rank has only a part of them."
        fix = "Log those of the whole model: trainer.add_callback(hfp.WeightStatistics(trainer))."
        print_once(Problem(code="FSDP-W675", message=message, fix=fix))
        log = None
    return original(models, criterion, log, *args, **kwargs)
