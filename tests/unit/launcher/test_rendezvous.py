"""What launchers tell each other during an attempt."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.launcher.rendezvous import Rendezvous
from hf_fsdp_plugin.launcher.world import World
from hf_fsdp_plugin.runs.attempts import FailedAttempt, Restarts
from hf_fsdp_plugin.spec.fsdp_spec import LaunchSection


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "LOOK", 0.0)
    monkeypatch.setattr(time_limits, "VERDICT", 0.3)


def store() -> Any:
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    return store


def met(store: Any, machine: int, num_machines: int) -> Rendezvous:
    """A machine that has met the others in a store."""
    world = World(device="cpu", num_machines=num_machines, machine_rank=machine, num_local=1)
    rendezvous = Rendezvous(LaunchSection(num_machines=num_machines), world, Restarts())
    rendezvous._store = store
    return rendezvous


def attempt(failure: str) -> FailedAttempt:
    return FailedAttempt(failure=failure, steps=3)


def test_first_announcement_holds_on_all_machines() -> None:
    shared = store()
    one, two, three = (met(shared, machine, 3) for machine in range(3))
    two.announce("rank 2: boom")
    one.announce("rank 0: lost the connection")
    assert {str(each.failure()) for each in (one, two, three)} == {"machine 1: rank 2: boom"}
    assert [each.is_first for each in (one, two, three)] == [False, True, False]
    two.agree(attempt("rank 2: boom"))
    assert {each.agree(attempt("lost")).failure for each in (one, three)} == {"rank 2: boom"}


def test_machine_that_announced_and_is_gone_was_lost() -> None:
    shared = store()
    one, two = met(shared, 0, 2), met(shared, 1, 2)
    two.announce("rank 2: boom")
    one.failure()
    found = one.agree(attempt("rank 0: lost the connection"))
    assert (found.failure, found.machine, found.steps, found.final) == ("machine 1 was lost", 1, 3, "")


class CutStore:
    """A store whose host is gone."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*args: Any) -> Any:
            raise RuntimeError("Connection reset by peer")

        return fail


def test_lost_store_ends_the_run() -> None:
    machines = met(CutStore(), 1, 2)
    found = machines.failure()
    assert found is not None and found.kind == "lost"
    assert "the launcher that hosts the rendezvous is gone" in machines.agree(attempt("x")).final


def test_failure_beside_a_lost_store_is_announced_as_the_loss() -> None:
    """The ranks of this machine end before it has noticed that the store is gone."""
    machines = met(CutStore(), 1, 2)
    assert machines.announce("rank 3: Connection reset by peer").kind == "lost"
    assert machines.agree(attempt("x")).final
