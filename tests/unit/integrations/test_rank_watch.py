"""The decision of the watch of the ranks: when all of them wait, and in different calls."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch.distributed as dist

from hf_fsdp_plugin.backends.arrival_rounds import place_key
from hf_fsdp_plugin.integrations import rank_watch
from hf_fsdp_plugin.integrations.rank_watch import RankState, find_cause


def state(call: str = "forward", *, steps: int = 3, forwards: int = 3, **more: Any) -> RankState:
    given = {"place": f"in {call}", "arrival": "", "model": "Llama", "waits": True} | more
    return RankState(call=call, steps=steps, forwards=forwards, **given)


SAVE = {"arrival": "Accelerator.save_state"}


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ([state(forwards=4), state("wait_for_everyone")], "FSDP-E790"),
        ([state("backward", forwards=5), state("backward", forwards=4)], "FSDP-E790"),
        ([state(steps=4, forwards=5), state("the report at the end of the script", forwards=4)], "FSDP-E790"),
        ([state("save_state", **SAVE), state(forwards=4)], "FSDP-E790"),
        ([state("save_state", **SAVE), state("wait_for_everyone")], "FSDP-E790"),
        # A rank that sleeps, computes or receives a long message may still make the call.
        ([state(forwards=4), state("", waits=False)], "FSDP-W791"),
        # A rank can be one step ahead while a message of the step before is on its way.
        ([state(steps=4, forwards=5), state("backward", forwards=4)], "FSDP-W791"),
    ],
)
def test_different_calls_are_told(states: list[RankState], code: str) -> None:
    problem = find_cause(dict(enumerate(states)), 45)
    assert problem is not None and problem.code == code
    assert all(f"in {each.call}" in problem.message for each in states if each.call)


@pytest.mark.parametrize(
    "states",
    [
        [state(), state()],
        [state(), state("backward")],
        [state("save_state", **SAVE), state("save_state", **SAVE)],
        [state("", waits=False), state("", waits=False)],
    ],
)
def test_equal_calls_are_no_hang(states: list[RankState]) -> None:
    assert find_cause(dict(enumerate(states)), 45) is None


def test_equal_places_are_merged() -> None:
    problem = find_cause({0: state(forwards=4), **{rank: state("barrier") for rank in range(1, 1000)}}, 45)
    assert problem is not None and len(problem.message) < 600
    assert "Rank 0 called Llama 4 times" in problem.message and "ranks 1, 2" in problem.message


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """This process as rank 1 of 2 ranks with this store."""
    store = dist.HashStore()
    for name, value in (("get_world_size", 2), ("get_rank", 1)):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(rank_watch, "place_store", lambda: store)
    return store


@pytest.fixture
def exits(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The exit codes with which the watch of this process ends it, while a thread runs the watch."""
    found: list[int] = []
    monkeypatch.setattr(rank_watch.os, "_exit", found.append)
    stopped = threading.Event()
    behind = state("wait_for_everyone")
    sampler = rank_watch._Sampler(0.4, lambda stack: behind, stopped)
    thread = threading.Thread(target=sampler.run)
    thread.start()
    yield found
    stopped.set()
    thread.join()


def stop_rank_0(store: dist.Store, of: RankState) -> None:
    store.set(place_key(0), json.dumps(asdict(of)))
    store.add("stopped", 1)


def test_rank_that_completes_the_count_ends_the_run(store: Any, exits: list[int], capsys: Any) -> None:
    stop_rank_0(store, state(forwards=4))
    time.sleep(1.5)  # this thread does not move
    assert exits == [rank_watch.EXIT_CODE] and "[FSDP-E790]" in capsys.readouterr().err


def test_rank_that_moves_again_withdraws_its_place(store: Any, exits: list[int]) -> None:
    time.sleep(1.2)
    assert store.check([place_key(1)]) and store.add("stopped", 0) == 1
    deadline = time.monotonic() + 3
    while store.check([place_key(1)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not store.check([place_key(1)]) and store.add("stopped", 0) == 0 and not exits
