"""Ranks agree on a step, although only one of them is asked."""

from __future__ import annotations

import threading
import time
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


def wait_for_answer(rank: AgreedStep) -> None:
    while not rank._has_answered:
        time.sleep(0.01)


def test_agreed_step_is_the_highest(make: Callable[[int, int], AgreedStep]) -> None:
    behind, ahead = make(0, 1), make(1, 1)
    assert not any(rank.is_reached(1) for rank in (behind, ahead))
    assert not ahead.is_reached(2)
    behind.ask()
    for rank in (behind, ahead):
        wait_for_answer(rank)
    assert [behind.is_reached(step) for step in (2, 3, 4)] == [False, True, False]
    assert ahead.is_reached(3)
    behind.close(), ahead.close()


def test_next_round_has_its_own_reason(make: Callable[[int, int], AgreedStep]) -> None:
    ranks = make(0, 1), make(1, 1)
    for step, reason in ((1, "file"), (2, "signal")):
        ranks[0].ask(reason)
        ranks[1].ask("later")
        for rank in ranks:
            wait_for_answer(rank)
        assert [rank.is_reached(step) for rank in ranks] == [True, True]
        assert [rank.reason() for rank in ranks] == [reason, reason]
        for rank in ranks:
            rank.begin_round(step + 1)
    for rank in ranks:
        assert not rank.is_reached(3)
        rank.close()


def test_reason_that_a_rank_finds_is_asked(make: Callable[[int, int], AgreedStep]) -> None:
    first = make(0, 4)
    second = make(1, 4)
    second._find_reason = lambda: "found"
    wait_for_answer(first), wait_for_answer(second)
    assert first.is_reached(4) and first.reason() == "found"
    first.close(), second.close()


def test_nothing_is_asked_before_the_next_round(make: Callable[[int, int], AgreedStep]) -> None:
    """The reason may be a file that exists until what it asks for is done."""
    looks: list[int] = []
    ranks = make(0, 1), make(1, 1)
    ranks[0]._find_reason = lambda: looks.append(len(looks)) or "file"  # type: ignore[func-returns-value]
    for rank in ranks:
        wait_for_answer(rank)
    assert [rank.is_reached(1) for rank in ranks] == [True, True]
    num_looks = len(looks)
    time.sleep(0.1)
    assert len(looks) == num_looks and not any(rank.is_reached(2) for rank in ranks)
    ranks[0]._find_reason = lambda: ""
    for rank in ranks:
        rank.begin_round(3)
    time.sleep(0.1)
    assert not any(rank.is_reached(3) for rank in ranks)
    for rank in ranks:
        rank.close()


def test_rank_at_its_end_answers(make: Callable[[int, int], AgreedStep]) -> None:
    first, second = make(0, 5), make(1, 5)
    second.close()
    first.ask()
    wait_for_answer(first)
    assert first.is_reached(5)
    first.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hf_fsdp_agreed_step"]


def test_silent_rank_is_named(make: Callable[[int, int], AgreedStep], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreed_step, "ANSWER_LIMIT", 0.05)
    first = make(0, 1)
    first.ask()
    wait_for_answer(first)
    with pytest.raises(SpecError, match=r"rank 1 did not report.*FSDP-E427"):
        first.is_reached(1)
    first.close()
