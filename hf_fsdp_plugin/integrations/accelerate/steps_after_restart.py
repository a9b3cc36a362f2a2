"""The samples and the learning-rate schedule of the steps after a restart with another number of ranks.

The gradient accumulation changes, so that a step has as many samples as before. Schedules that would not be the same
are reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hf_fsdp_plugin.integrations.accelerate import private
from hf_fsdp_plugin.integrations.accelerate.loader_batch import samples_at_once
from hf_fsdp_plugin.integrations.samples import batch_facts, kept_accumulation, samples_problem
from hf_fsdp_plugin.messages import print_once
from hf_fsdp_plugin.state import parts_of

_PROBES: Final = (0, *(2**power for power in range(21)))
"""Optimizer steps at which two learning-rate schedules are compared."""


@dataclass
class AccelerateLoop:
    """The training loop of an Accelerator: whether it calls ``accumulate``."""

    accumulates: bool = False


def notice_accumulation(accelerator: Any, optimizer: Optimizer) -> None:
    """Remember at the steps of an optimizer whether the loop calls ``accelerator.accumulate``.

    A loop that does not makes a step after each batch, whatever the number of accumulated batches is.
    """

    def notice(*_: Any) -> None:
        if accelerator.step:
            parts_of(accelerator).get(AccelerateLoop).accumulates = True

    optimizer.register_step_pre_hook(notice)


def batch_of(accelerator: Any) -> dict[str, Any]:
    """Return the samples of an optimizer step, and the schedules of the learning rate, for the manifest."""
    accumulation = accelerator.gradient_accumulation_steps
    samples = next(filter(None, map(samples_at_once, private.prepared_dataloaders(accelerator))), None)
    schedules = [(_scheduler_steps(each), each) for each in private.prepared_schedulers(accelerator)]
    return {
        **batch_facts(accumulation, samples * accumulation if samples is not None else None),
        "accumulates": parts_of(accelerator).get(AccelerateLoop).accumulates,
        "schedules": [{"steps": steps, "factors": _factors(each, steps)} for steps, each in schedules],
    }


def keep_samples_per_step(accelerator: Any, checkpoint: Path, saved: Mapping[str, Any]) -> None:
    """Change accumulation and schedulers after ``load_state`` in a restart, so that a step remains what it was.

    Args:
        saved: the field ``batch`` of the manifest of the checkpoint.
    """
    if saved.get("accumulates"):
        parts_of(accelerator).get(AccelerateLoop).accumulates = True
        accelerator.gradient_accumulation_steps = kept_accumulation(saved, batch_of(accelerator))
        # Accelerate counts batches, and makes a step when the accumulation divides their number.
        accelerator.step = accelerator.step // saved["accumulation"] * accelerator.gradient_accumulation_steps
    now = batch_of(accelerator)
    before, samples = saved.get("samples_per_step"), now.get("samples_per_step")
    ratio = samples / before if before and samples else None
    schedulers, schedules = private.prepared_schedulers(accelerator), saved.get("schedules", ())
    further = [
        "the schedule of the learning rate is not the one that was saved"
        for scheduler, schedule in zip(schedulers, schedules, strict=False)
        if not _keep_schedule(scheduler, schedule, ratio)
    ]
    if (problem := samples_problem(checkpoint, saved, now, further)) is not None:
        print_once(problem)


def _keep_schedule(scheduler: Any, saved: Mapping[str, Any], ratio: float | None) -> bool:
    """Advance a scheduler as far in each step as before the restart.

    torch's schedulers load their length from the checkpoint, and advance with the samples, as Accelerate has it. The
    length of a ``LambdaLR``, such as all of ``transformers.get_scheduler``, is the script's. If the script has
    multiplied it by the number of ranks, the scheduler continues at the same place of it, and advances as before.

    Args:
        ratio: samples of a step, now to before; ``None`` if unknown.

    Returns:
        Whether the schedule is the same function of the steps.
    """
    steps, before = _scheduler_steps(scheduler), saved["steps"]
    if steps == before:
        return True
    if _is_same(_factors(scheduler, steps), saved["factors"]):
        scheduler.scheduler.last_epoch = scheduler.scheduler.last_epoch * steps // before
        return True
    wanted = steps if ratio is None else max(1, round(before * ratio))
    if wanted != steps:
        scheduler.split_batches = True  # one step of the scheduler for each call
        scheduler.step = _Steps(scheduler, wanted)
    return _is_same(_factors(scheduler, before), saved["factors"]) is not False


class _Steps:
    """Replaces ``AcceleratedScheduler.step`` of an object that has ``split_batches``.

    Attributes:
        num: steps of the scheduler in each optimizer step.
    """

    def __init__(self, scheduler: Any, num: int) -> None:
        self._scheduler, self.num = scheduler, num

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        scheduler, inner = self._scheduler, self._scheduler.scheduler
        for _ in range(self.num if scheduler.gradient_state.sync_gradients else 1):
            if getattr(inner, "total_steps", None) is None or inner.last_epoch < inner.total_steps:
                type(scheduler).step(scheduler, *args, **kwargs)


def _scheduler_steps(scheduler: Any) -> int:
    """Return the number of steps of a prepared scheduler in each optimizer step."""
    if isinstance(scheduler.step, _Steps):
        return scheduler.step.num
    is_single = scheduler.split_batches or not scheduler.step_with_optimizer
    return 1 if is_single else dist.get_world_size()


def _factors(scheduler: Any, steps: int) -> list[float] | None:
    """Return the factors of the learning rate at some optimizer steps; ``None`` if they are not a ``LambdaLR``'s."""
    if not isinstance(scheduler.scheduler, LambdaLR):
        return None
    try:
        return [float(scheduler.scheduler.lr_lambdas[0](steps * probe)) for probe in _PROBES]
    except Exception:  # a script's function may raise after its last step
        return None


def _is_same(factors: list[float] | None, saved: list[float] | None) -> bool | None:
    """Return whether two schedules are equal; ``None`` if the factors of one of them are unknown."""
    if factors is None or saved is None:
        return None
    return all(math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in zip(factors, saved, strict=True))
