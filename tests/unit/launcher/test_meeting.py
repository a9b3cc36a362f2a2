"""Launchers that meet again: through a real store, each in a thread of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hf_fsdp_plugin import SpecError
from hf_fsdp_plugin.launcher.launcher_store import LauncherStore
from hf_fsdp_plugin.launcher.machines import Machines
from hf_fsdp_plugin.launcher.meeting import Meeting, Met
from hf_fsdp_plugin.launcher.world import World
from hf_fsdp_plugin.runs.restarts import FailedAttempt, Restarts
from hf_fsdp_plugin.spec.model import LaunchSection

RUN = Restarts(run_id="a", max_restarts=3)
ONCE = RUN.after(FailedAttempt(failure="rank 0: exit code 1"))


def meeting(machine: int, port: int, seconds: int = 20) -> Meeting:
    launch = LaunchSection(
        num_machines=2, machine_rank=machine, main_process_ip="127.0.0.1", main_process_port=port, use_cpu=True
    )
    return Meeting(launch, World(device="cpu", num_machines=2, machine_rank=machine, num_local=1), f"timeout={seconds}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def at_once(*functions: Callable[[], Any]) -> list[Any]:
    """The results of functions that wait for each other; an exception is a result."""
    results: list[Any] = [None] * len(functions)

    def call(number: int) -> None:
        try:
            results[number] = functions[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def code_of(result: Any) -> str:
    assert isinstance(result, SpecError), result
    return result.problems[0].code


@pytest.fixture
def two() -> tuple[list[Meeting], list[Met]]:
    """Two machines that have met."""
    port = free_port()
    meetings = [meeting(0, port), meeting(1, port)]
    return meetings, at_once(lambda: meetings[0].meet(RUN, None), lambda: meetings[1].meet(RUN, None))


def test_second_meeting_has_another_store_for_ranks(two: tuple[list[Meeting], list[Met]]) -> None:
    meetings, first = two
    again = at_once(*(lambda n=n: meetings[n].meet(ONCE if n else RUN, first[n].store) for n in (0, 1)))
    assert {met.port for met in first} != {met.port for met in again}
    assert len({met.port for met in again}) == 1
    assert [met.restarts for met in again] == [ONCE, ONCE], "all take the failures that one machine knows"
    assert [met.store.number for met in again] == [1, 1]


def test_machine_that_does_not_come_back_is_an_error(two: tuple[list[Meeting], list[Met]]) -> None:
    meetings, first = two
    meetings[0].seconds = 1.0
    (found,) = at_once(lambda: meetings[0].meet(ONCE, first[0].store))
    assert code_of(found) == "FSDP-E717" and "machine 1 did not join" in str(found)


def test_second_launcher_of_a_live_machine_is_refused(two: tuple[list[Meeting], list[Met]]) -> None:
    meetings, first = two
    port = first[0].port
    launch = LaunchSection(num_machines=2, main_process_ip="127.0.0.1", main_process_port=port)
    world = World(device="cpu", num_machines=2, machine_rank=1, num_local=1)
    live = Machines(meetings[1], launch, world, first[1].store)
    try:
        (found,) = at_once(lambda: meeting(1, port).meet(RUN, None))
        assert code_of(found) == "FSDP-E719"
        assert live.failure() is None, "the run goes on"
    finally:
        live.close()


def test_launcher_of_a_lost_machine_stops_the_others(two: tuple[list[Meeting], list[Met]]) -> None:
    meetings, first = two
    host: LauncherStore = first[0].store
    launch = LaunchSection(num_machines=2, main_process_ip="127.0.0.1", main_process_port=first[0].port)
    world = World(device="cpu", num_machines=2, machine_rank=0, num_local=1)
    machines = Machines(meetings[0], launch, world, host)

    def stop_and_meet() -> Met:
        while machines.failure() is None:
            pass
        assert machines.failure() == "machine 1: its launcher was started again"
        decision = machines._decide_for_all(host_verdict(), RUN, float("inf"))
        machines.close()
        return meetings[0].meet(decision.restarts, host)

    back, again = at_once(lambda: meeting(1, first[0].port).meet(RUN, None), stop_and_meet)
    assert back.restarts == again.restarts and back.restarts.failures[0].failure == "machine 1 was lost"
    assert back.restarts.run_id == RUN.run_id


def host_verdict() -> Any:
    from hf_fsdp_plugin.runs.restart_rule import Verdict

    return Verdict(attempt=FailedAttempt(failure="lost the connection"), order=(True, False, 1.0))
