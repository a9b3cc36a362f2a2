"""Rounds of arrival in a store: complete, failed, late, repeated."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from hf_fsdp_plugin import rank_variables
from hf_fsdp_plugin.backends.ranks import agreement
from hf_fsdp_plugin.backends.ranks.agreement import (
    Round,
    announce_end,
    preparation_limit,
    wait_for_all_ranks,
)
from hf_fsdp_plugin.problems import SpecError

LONG, SHORT = 3600.0, 0.3  # no test waits LONG, which is longer than the time limit of a test


def together(*ranks: Callable[[], Any]) -> list[Any]:
    """Run one function per rank at the same time, and return the results."""
    results: list[Any] = [None] * len(ranks)

    def run(index: int) -> None:
        results[index] = ranks[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def join(store: dist.Store, rank: int, call: str = "save", *, of: int = 3, limit: float = LONG) -> Any:
    return Round(store, call, rank, of).join(limit)


def test_complete_rounds_follow_each_other(store: dist.Store) -> None:
    for _ in range(3):
        assert together(*(lambda rank=rank: join(store, rank) for rank in range(3))) == [[], [], []]
    assert store.add("round", 0) == 3
    assert not store.check(["1/rank0"]), "the keys of earlier rounds are deleted"


def test_missing_rank_is_named_by_all_that_waited(store: dist.Store) -> None:
    results = together(*(lambda rank=rank: join(store, rank, limit=SHORT) for rank in (0, 2)))
    assert results == [[(1, "")], [(1, "")]]


def test_other_call_of_a_rank_is_named(store: dist.Store) -> None:
    first, second = together(
        lambda: join(store, 0, "save", of=2, limit=SHORT), lambda: join(store, 1, "push", of=2, limit=LONG)
    )
    assert (first, second) == ([(1, "push")], [(0, "save")])


def test_another_call_ends_the_round_before_the_limit(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_SETTLE", SHORT)
    results = together(
        lambda: join(store, 0, "save", of=3, limit=LONG), lambda: join(store, 1, "evaluate", of=3, limit=LONG)
    )
    assert sorted(len(result) for result in results) == [1, 2]
    assert dict(min(results, key=len)) in ({0: "save"}, {1: "evaluate"})


def test_only_the_first_call_waits(world: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = agreement.FirstCalls()
    with pytest.raises(SpecError):
        calls.wait("clip", fix="Call it on all ranks.", limit=SHORT)
    monkeypatch.setattr(agreement, "wait_for_all_ranks", lambda *_, **__: None)
    calls.wait("clip", fix="", limit=SHORT)
    monkeypatch.setattr(agreement, "wait_for_all_ranks", None)
    calls.wait("clip", fix="", limit=SHORT)


def test_rank_that_ended_its_script_ends_the_wait(world: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_SETTLE", SHORT)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "get_rank", lambda: 2)
        announce_end()
    with pytest.raises(SpecError) as caught:
        wait_for_all_ranks("save", limit=LONG)
    assert "rank 0 did not call it; rank 2 did not call it and ended the script" in str(caught.value)


@pytest.mark.parametrize(("seconds", "limit"), [(600, 540), (60, 540), (7200, 6480)])
def test_preparation_waits_for_a_part_of_the_time_out(world: dist.Store, seconds: int, limit: float) -> None:
    world.set_timeout(timedelta(seconds=seconds))
    assert preparation_limit() == limit


def test_call_can_be_repeated_after_a_failure(store: dist.Store) -> None:
    assert join(store, 0, of=2, limit=SHORT) == [(1, "")]
    assert together(lambda: join(store, 0, of=2), lambda: join(store, 1, of=2)) == [[], []]


def test_late_rank_waits_in_the_next_round(store: dist.Store) -> None:
    assert join(store, 0, of=2, limit=SHORT) == [(1, "")]
    assert join(store, 1, of=2, limit=SHORT) == [(0, "")]


def test_interrupted_wait_ends_the_round(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Round, "_wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            join(store, 0, of=2)
    assert together(lambda: join(store, 0, of=2), lambda: join(store, 1, of=2)) == [[], []]


@pytest.fixture
def world(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """This process as rank 1 of 3 ranks with this store."""
    for name, value in (("is_initialized", True), ("get_world_size", 3), ("get_rank", 1)):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(agreement, "default_store", lambda: store)
    return store


def test_problem_names_call_and_ranks(world: dist.Store) -> None:
    with pytest.raises(SpecError) as caught:
        wait_for_all_ranks("save_pretrained of Llama", limit=SHORT)
    assert [problem.code for problem in caught.value.problems] == ["FSDP-E670"]
    assert "save_pretrained of Llama" in str(caught.value) and "ranks 0, 2" in str(caught.value)


@pytest.mark.parametrize("value", ["none", "0", "-3", "nan"])
def test_invalid_limit_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(rank_variables.ARRIVAL_LIMIT_VARIABLE, value)
    with pytest.raises(SpecError) as caught:
        rank_variables.arrival_limit(45.0)
    assert [problem.code for problem in caught.value.problems] == ["FSDP-E674"]
    monkeypatch.setenv(rank_variables.ARRIVAL_LIMIT_VARIABLE, "7.5")
    assert rank_variables.arrival_limit(45.0) == 7.5


@pytest.mark.parametrize(("world_size", "first"), [(2, 0.001), (16, 0.001), (512, 0.032), (8192, 0.25)])
def test_first_pause_grows_with_the_world(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, world_size: int, first: float
) -> None:
    """One process answers the questions of all ranks."""
    pauses: list[float] = []
    monkeypatch.setattr(agreement.time, "sleep", pauses.append)
    Round(store, "save", 0, world_size)._wait(0, 0.3)
    assert pauses[0] == pytest.approx(first, rel=0.2)
    assert all(pause >= first * 0.8 for pause in pauses[:3])
