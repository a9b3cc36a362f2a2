"""Schedules of optimizers whose groups were others when they were saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from hf_fsdp_plugin.checkpoint.reading.optimizer import SavedPositions, schedules_follow_groups
from hf_fsdp_plugin.state import parts_of

RATES = (0.1, 0.2, 0.3, 0.4)


class Halved:
    """A schedule with a state, which torch saves for each group."""

    def __call__(self, step: int) -> float:
        return 0.5**step


def sequential(optimizer: Any) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 8)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Halved()),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "sequential": sequential,
}


def optimizer_of(rates: tuple[float, ...]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.zeros(1)], "lr": rate} for rate in rates])


def rates_of(optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> list[list[float]]:
    found = []
    for _ in range(steps):
        optimizer.step()
        schedule.step()
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("positions", [(0, 2), (3, 3, 1, 0, 2, 2)])
def test_loaded_schedule_continues_for_other_groups(name: str, positions: tuple[int, ...]) -> None:
    saved = optimizer_of(RATES)
    schedule = SCHEDULES[name](saved)
    rates_of(saved, schedule, 3)
    state, groups = schedule.state_dict(), [group["lr"] for group in saved.param_groups]
    expected = [[rates[position] for position in positions] for rates in rates_of(saved, schedule, 4)]

    new = optimizer_of(tuple(RATES[position] for position in positions))
    loaded = SCHEDULES[name](new)
    for group, position in zip(new.param_groups, positions, strict=True):
        group["lr"] = groups[position]
    parts_of(new).put(SavedPositions(positions))
    with schedules_follow_groups([loaded]):
        loaded.load_state_dict(state)
    assert "load_state_dict" not in vars(loaded)
    assert rates_of(new, loaded, 4) == [pytest.approx(rates) for rates in expected]
