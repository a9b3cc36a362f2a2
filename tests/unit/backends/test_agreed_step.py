"""Ranks agree on a step, although only one of them is asked."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from hf_fsdp_plugin.backends.ranks import agreed_step
from hf_fsdp_plugin.backends.ranks.agreed_step import AgreedStep
from hf_fsdp_plugin.problems import SpecError


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], AgreedStep]:
    """Make the object of one of two ranks, which share a store."""
    store = dist.HashStore()
    monkeypatch.setattr(agreed_step, "default_store", lambda: store)
    monkeypatch.setattr(agreed_step, "broadcast_object", lambda _: "name")
    monkeypatch.setattr(agreed_step, "_PAUSE", 0.01)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def of_rank(rank: int, step: int) -> AgreedStep:
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        return AgreedStep(step)

    return of_rank


def test_agreed_step_is_the_highest(make: Callable[[int, int], AgreedStep]) -> None:
    behind, ahead = make(0, 1), make(1, 1)
    assert not any(rank.is_reached(1) for rank in (behind, ahead))
    assert not ahead.is_reached(2)
    behind.ask()
    for rank in (behind, ahead):
        rank._thread.join()  # both have answered
    assert [behind.is_reached(step) for step in (2, 3, 4)] == [False, True, False]
    assert ahead.is_reached(3)
    behind.close(), ahead.close()


def test_rank_at_its_end_answers(make: Callable[[int, int], AgreedStep]) -> None:
    first, second = make(0, 5), make(1, 5)
    second.close()
    first.ask()
    first._thread.join()
    assert first.is_reached(5)
    first.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hf_fsdp_agreed_step"]


def test_silent_rank_is_named(make: Callable[[int, int], AgreedStep], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreed_step, "ANSWER_LIMIT", 0.05)
    first = make(0, 1)
    first.ask()
    first._thread.join()
    with pytest.raises(SpecError, match=r"rank 1 did not report.*FSDP-E427"):
        first.is_reached(1)
    first.close()
