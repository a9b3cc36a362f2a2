"""``ExponentialMovingAverageCallback``, and callbacks that average whole copies of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hf_fsdp_plugin.integrations.moving_average import ExponentialMovingAverage
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.problems import Problem, SpecError


class ExponentialMovingAverageCallback(TrainerCallback):
    """Averages the trained weights after each optimizer step of a Trainer with FSDP.

    Each checkpoint contains the averages, and a resumed training continues them. With ``load_best_model_at_end``, those
    of the best checkpoint are loaded.

    Args:
        decay: see :class:`ExponentialMovingAverage`.
        evaluate: whether ``evaluate`` and ``predict`` compute with the averages, during and after the training.
        export: the folder, relative to ``output_dir``, to which the model with the averages is written at the end of
            the training; ``None`` for none.

    Attributes:
        average: the average, from the begin of the training on.
        resume_from: the checkpoint from which the training resumes.
    """

    def __init__(self, decay: float = 0.999, *, evaluate: bool = True, export: str | None = "ema") -> None:
        self.average: ExponentialMovingAverage | None = None
        self.resume_from: Path | None = None
        self._decay, self._evaluate, self._export = decay, evaluate, export

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.average = ExponentialMovingAverage(model, self._decay)
        if self.resume_from is not None:
            self.average.load(self.resume_from)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.average is not None
        self.average.update()

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, processing_class: Any = None, **kwargs: Any
    ) -> None:
        assert self.average is not None
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self.average.load(Path(state.best_model_checkpoint))
        inner: Any = unwrapped(model)
        if self._export is None or not hasattr(inner, "save_pretrained"):
            return
        folder = Path(args.output_dir) / self._export
        with self.average.applied():
            inner.save_pretrained(str(folder))
        if processing_class is not None and state.is_world_process_zero:
            processing_class.save_pretrained(str(folder))

    def __deepcopy__(self, memo: Any) -> ExponentialMovingAverageCallback:
        """Return a callback with the same settings for another Trainer."""
        return ExponentialMovingAverageCallback(self._decay, evaluate=self._evaluate, export=self._export)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let the model have the averages in the block, if they are used for evaluations."""
        if not self._evaluate or self.average is None or self.average.is_applied:
            yield
            return
        with self.average.applied():
            yield


def moving_averages(trainer: Any) -> list[ExponentialMovingAverageCallback]:
    return [each for each in trainer.callback_handler.callbacks if isinstance(each, ExponentialMovingAverageCallback)]


def prepare_moving_averages(trainer: Any, checkpoint: Any) -> None:
    """Tell the callbacks from which checkpoint the training resumes, and refuse callbacks that cannot average shards.

    Raises:
        SpecError: a callback of TRL averages whole copies of the weights.
    """
    for callback in trainer.callback_handler.callbacks:
        if any(base.__name__ == "BEMACallback" for base in type(callback).__mro__):
            message = f"{type(callback).__name__} averages whole copies of the weights, but each rank has only shards."
            fix = "Use hfp.ExponentialMovingAverageCallback, which averages the shards, or train without FSDP."
            raise SpecError([Problem(code="FSDP-E627", message=message, fix=fix)])
    for average in moving_averages(trainer):
        average.resume_from = Path(checkpoint) if isinstance(checkpoint, str | Path) else None
