"""Calls of checkpointed modules in forward and backward are counted."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hf_fsdp_plugin.observe.first_step import Recomputation


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
