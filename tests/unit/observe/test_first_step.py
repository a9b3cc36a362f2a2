"""The facts that are recorded in the first training step, and later."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_fsdp_plugin.observe.first_step import Recomputation, StableValues, record_first_step, recorded_first_step
from hf_fsdp_plugin.observe.units import gradient_bytes
from tests.unit.observe.live_models import make_model


def test_first_training_step_is_recorded() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    assert recorded_first_step(model).grads_bytes is None
    first_step = record_first_step(model, optimizer)
    model.eval()(torch.ones(1, 4))
    assert first_step.output_dtype is None
    for _ in range(2):
        model.train()(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert first_step.output_dtype is torch.float32
    assert first_step.grads_bytes == 4 * 50 and gradient_bytes(model, []) == 0
    assert recorded_first_step(model) is first_step


def run(*, neutralized: bool = False, reentrant: bool = False, frozen: bool = False) -> Recomputation:
    """Train two layers, of which the first is checkpointed unless it is neutralized."""
    model = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])
    model.requires_grad_(not frozen)
    counted = Recomputation({"0": model[0], "1": model[1]})
    call = model[0] if neutralized else partial(checkpoint, model[0], use_reentrant=reentrant)
    value = call(torch.randn(2, 4, requires_grad=not frozen))
    value = checkpoint(model[1], value, use_reentrant=reentrant)
    if value.requires_grad:
        value.sum().backward()
    counted.close()
    return counted


def test_checkpointed_modules_are_recomputed() -> None:
    for reentrant in (False, True):
        found = run(reentrant=reentrant)
        assert (found.not_recomputed, found.num_recomputed) == ((), 2)


def test_neutralized_checkpoint_is_not_recomputed() -> None:
    found = run(neutralized=True)
    assert (found.not_recomputed, found.num_recomputed) == (("0",), 1)


def test_frozen_modules_need_no_recomputation() -> None:
    found = run(frozen=True)
    assert (found.not_recomputed, found.num_recomputed) == ((), 0)


def test_hooks_are_removed() -> None:
    model = nn.Linear(2, 2)
    Recomputation({"": model}).close()
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("numbers", "values"),
    [
        ([4] * 9, [4]),
        ([4, 4, 4, 1] * 3, [4]),
        ([4, 4, 4, 2, 2, 2, 4, 4, 4], [4, 2]),
        ([3, 1, 4, 1, 5, 9], []),
        ([number for number in range(20) for _ in range(3)], list(range(8))),
    ],
)
def test_runs_have_the_values_of_three_equal_numbers(numbers: list[int], values: list[int]) -> None:
    runs = StableValues()
    for number in numbers:
        runs.add(number)
    assert runs.values == values
