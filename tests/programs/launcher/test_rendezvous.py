"""Launchers that meet: through torch's rendezvous and real stores, each in a thread of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec

from hf_fsdp_plugin import SpecError
from hf_fsdp_plugin.launcher.rendezvous import Rendezvous, compare_facts
from hf_fsdp_plugin.launcher.world import World
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.runs.attempts import FailedAttempt, Restarts
from hf_fsdp_plugin.spec.fsdp_spec import LaunchSection

RUN = Restarts(run_id="a", max_restarts=3)
ONCE = RUN.after(FailedAttempt(failure="rank 0: exit code 1"))
FACTS = {"the number of ranks": "1 on cpu", "--max_restarts": "3", "the script": "`train.py`", "fsdp.version": "2"}


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as the launcher sets it


def machine(
    number: int,
    port: int,
    restarts: Restarts = RUN,
    facts: dict[str, str] = FACTS,
    backend: str = "static",
    **more: Any,
) -> Rendezvous:
    launch = LaunchSection(
        num_machines=2,
        machine_rank=number,
        main_process_ip="127.0.0.1",
        main_process_port=port,
        rdzv_backend=backend,
        use_cpu=True,
    )
    world = World(device="cpu", num_machines=2, machine_rank=number, num_local=1)
    return Rendezvous(launch, world, restarts, facts=facts, **({"conf": "timeout=60"} | more))


def meet(rendezvous: Rendezvous) -> dict[str, str]:
    """The steps of torch's agent before it starts ranks. Returns the variables of the ranks."""
    handler = rendezvous.open()
    try:
        info = handler.next_rendezvous()
    except Exception as error:
        raise rendezvous.not_met(error) from error
    group = WorkerGroup(WorkerSpec("default", 1, handler, entrypoint="true"))
    group.store, group.group_rank, group.group_world_size = info.store, info.rank, info.world_size
    store_info: Any = info.bootstrap_store_info
    group.master_addr, group.master_port = store_info.master_addr, store_info.master_port
    return rendezvous.meet(group)


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


def all_meet(machines: list[Rendezvous]) -> list[Any]:
    return at_once(*(lambda each=each: meet(each) for each in machines))  # type: ignore[misc]


def code_of(result: Any) -> str:
    assert isinstance(result, SpecError), result
    return result.problems[0].code


@pytest.fixture(params=["static", "c10d"])
def two(request: pytest.FixtureRequest, port: int) -> Iterator[list[Rendezvous]]:
    """Two machines that have met."""
    machines = [machine(number, port, backend=request.param) for number in (0, 1)]
    for result in all_meet(machines):
        assert not isinstance(result, Exception), result
    yield machines
    at_once(*(each.shutdown for each in machines))


def alone(port: int, problems: list[Problem]) -> Rendezvous:
    world = World(device="cpu", num_machines=1, machine_rank=0, num_local=1)
    return Rendezvous(LaunchSection(main_process_port=port), world, Restarts(), notice=problems.append)


def test_used_port_is_replaced_with_a_warning(port: int) -> None:
    problems: list[Problem] = []
    with socket.socket() as used:
        used.bind(("127.0.0.1", port))
        used.listen()
        meet(rendezvous := alone(port, problems))
    assert [problem.code for problem in problems] == ["FSDP-W711"] and str(port) in problems[0].message
    assert rendezvous.address != f"127.0.0.1:{port}"


def test_each_attempt_of_one_machine_has_another_store(port: int) -> None:
    problems: list[Problem] = []
    rendezvous = alone(port, problems)
    addresses = []
    for restarts in (rendezvous.restarts, ONCE):
        rendezvous.restarts = restarts
        found = meet(rendezvous)
        addresses.append(rendezvous.address)
        assert rendezvous.address == f"127.0.0.1:{found['MASTER_PORT']}"
    assert addresses[0] == f"127.0.0.1:{port}" != addresses[1] and not problems


def test_ranks_of_all_machines_have_one_store(two: list[Rendezvous]) -> None:
    assert sorted(each.machine for each in two) == [0, 1]
    assert two[0].address == two[1].address
    assert two[0].failure() is None


def test_second_meeting_has_another_store_for_ranks(two: list[Rendezvous]) -> None:
    before = two[0].address
    for each in two:  # as all launchers take the failed attempt of the machine that failed first
        each.restarts = ONCE
    for result in all_meet(two):
        assert not isinstance(result, Exception), result
    assert two[0].address == two[1].address != before


def test_machine_that_knows_most_tells_the_others(port: int) -> None:
    machines = [machine(0, port, backend="c10d"), machine(1, port, ONCE, backend="c10d")]
    all_meet(machines)
    assert [each.restarts for each in machines] == [ONCE, ONCE]
    at_once(*(each.shutdown for each in machines))


def test_machine_that_does_not_come_back_is_an_error(port: int) -> None:
    machines = [machine(number, port, conf="timeout=3") for number in (0, 1)]
    all_meet(machines)
    machines[0].restarts = ONCE
    assert machines[0].open() is machines[0].open()
    assert code_of(machines[0].not_met(RuntimeError("wait timeout"))) == "FSDP-E717"
    at_once(*(each.shutdown for each in machines))


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_missing_machine_is_an_error_after_the_timeout(port: int, backend: str) -> None:
    (found,) = at_once(lambda: meet(machine(0, port, backend=backend, conf="timeout=3")))
    assert code_of(found) == "FSDP-E707" and f"did not meet at 127.0.0.1:{port}" in str(found)


def test_two_machines_with_one_number_are_refused(port: int) -> None:
    """Torch's static rendezvous counts the launchers, and does not compare their numbers."""
    results = all_meet([machine(0, port, conf="timeout=3"), machine(0, port, conf="timeout=3")])
    assert "FSDP-E719" in [code_of(each) for each in results if isinstance(each, SpecError)]


def test_machines_learn_why_they_do_not_start(port: int) -> None:
    machines = [machine(0, port), machine(1, port, facts=FACTS | {"the number of ranks": "2 on cpu"})]
    results = all_meet(machines)
    at_once(*(each.shutdown for each in machines))
    assert [code_of(result) for result in results] == ["FSDP-E708", "FSDP-E708"]
    assert "the number of ranks is 1 on cpu here, and 2 on cpu on another machine" in str(results[0])
    assert "the number of ranks is 2 on cpu here, and 1 on cpu on another machine" in str(results[1])


def test_port_in_use_is_an_error(port: int) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", port))
        used.listen()
        (found,) = at_once(lambda: meet(machine(0, port, conf="timeout=3")))
    assert code_of(found) == "FSDP-E707" and "address already in use" in str(found)


def test_differences_are_named() -> None:
    assert compare_facts(FACTS, FACTS) is None
    assert compare_facts(FACTS | {"a setting of a newer version": "1"}, FACTS) is None
    for name in FACTS:
        problem = compare_facts(FACTS | {name: "9"}, FACTS)
        assert problem is not None and problem.code == "FSDP-E708"
        assert f"{name} is 9 here, and {FACTS[name]} on another machine." in problem.message
