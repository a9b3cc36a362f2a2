"""Uneven numbers of batches are reported, and a restart with other ranks keeps the samples of a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.utils.data import DataLoader
from transformers import get_scheduler

from hf_fsdp_plugin.integrations.accelerate.steps_after_restart import (
    AccelerateLoop,
    batch_of,
    keep_samples_per_step,
)
from hf_fsdp_plugin.state import parts_of


def loop(world_size: int, scheduler: Any, monkeypatch: pytest.MonkeyPatch, *, accumulation: int = 1) -> Any:
    """An Accelerator of one rank as far as ``keep_samples_per_step`` reads it, with batches of two samples."""
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    loader = prepare_data_loader(
        DataLoader(range(64), batch_size=2),  # type: ignore[arg-type]
        num_processes=world_size, process_index=0, even_batches=True,
    )  # fmt: skip
    prepared_scheduler = AcceleratedScheduler(scheduler, SimpleNamespace(step_was_skipped=False))
    accelerator = SimpleNamespace(
        _schedulers=[prepared_scheduler], _dataloaders=[loader], gradient_accumulation_steps=accumulation, step=6
    )
    parts_of(accelerator).get(AccelerateLoop).accumulates = True
    return accelerator


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def test_restart_scales_accumulation_and_its_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved = batch_of(loop(4, LambdaLR(sgd(), lambda step: 1.0), monkeypatch, accumulation=2))
    assert (saved["samples_per_step"], saved["accumulation"], saved["accumulates"]) == (16, 2, True)
    resumed = loop(2, LambdaLR(sgd(), lambda step: 1.0), monkeypatch, accumulation=2)
    keep_samples_per_step(resumed, tmp_path, saved)
    assert (resumed.gradient_accumulation_steps, resumed.step) == (4, 12)
    assert batch_of(resumed)["samples_per_step"] == 16


@pytest.mark.parametrize(("length", "is_reported"), [(80, False), (40, False), (60, True)])
def test_other_schedule_after_restart_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, length: int, is_reported: bool
) -> None:
    """The schedule had 80 steps on four ranks: 80 are the same ones on two ranks, and so are 40."""
    saved = batch_of(loop(4, get_scheduler("linear", sgd(), 8, 80), monkeypatch))
    after = get_scheduler("linear", sgd(), length // 10, length)
    after.last_epoch = 24  # as in the checkpoint
    resumed = loop(2, after, monkeypatch)
    keep_samples_per_step(resumed, tmp_path, saved)
    assert ("FSDP-W434" in capsys.readouterr().err) is is_reported
    assert after.last_epoch == (12 if length == 40 else 24)
    assert batch_of(resumed)["schedules"][0]["steps"] == (2 if length == 40 else 4)


def test_restart_keeps_length_of_torch_scheduler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``OneCycleLR`` loads its 40 steps, and raises at the step after them."""
    before = OneCycleLR(sgd(), 1.0, total_steps=40)
    saved = batch_of(loop(4, before, monkeypatch))
    after = OneCycleLR(sgd(), 1.0, total_steps=20)
    after.load_state_dict(before.state_dict())
    resumed = loop(2, after, monkeypatch)
    keep_samples_per_step(resumed, tmp_path, saved)
    (scheduler,) = resumed._schedulers
    steps = []
    for _ in range(11):
        scheduler.step()
        steps.append(after.last_epoch)
    assert steps == [*range(4, 41, 4), 40]
    assert batch_of(resumed)["schedules"] == [{"steps": 4, "factors": None}]
