"""Launchers that meet: through real stores, each in a thread of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from hf_fsdp_plugin import SpecError
from hf_fsdp_plugin.launcher.other_machines import compare_facts
from hf_fsdp_plugin.launcher.rendezvous import MachinesRendezvous, Rendezvous, _check_address, _limit_silence
from hf_fsdp_plugin.launcher.start_ranks import first_restarts
from hf_fsdp_plugin.launcher.world import World
from hf_fsdp_plugin.runs.restart_policy import FailedAttempt, Restarts
from hf_fsdp_plugin.spec.fsdp_spec import LaunchSection

RUN = Restarts(run_id="a", max_restarts=3)
ONCE = RUN.after(FailedAttempt(failure="rank 0: exit code 1"))
FACTS = {"the number of ranks": "1 on cpu", "--max_restarts": "3", "the script": "`train.py`", "fsdp.version": "2"}


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_FSDP_MACHINE_TIMEOUT", "8")


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def machine(
    number: int, port: int, restarts: Restarts = RUN, facts: dict[str, str] = FACTS, size: int = 2, **more: Any
) -> MachinesRendezvous:
    launch = LaunchSection(
        num_machines=size, machine_rank=number, main_process_ip="127.0.0.1", main_process_port=port, use_cpu=True
    )
    world = World(device="cpu", num_machines=size, machine_rank=number, num_local=1)
    return MachinesRendezvous(launch, world, facts, restarts, **({"conf": "timeout=120"} | more))


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
def two(port: int) -> Iterator[list[MachinesRendezvous]]:
    """Two machines that have met."""
    machines = [machine(0, port), machine(1, port)]
    for result in at_once(*(each.next_rendezvous for each in machines)):
        assert not isinstance(result, Exception), result
    yield machines
    at_once(*(each.shutdown for each in machines))


def test_one_machine_listens_on_the_loopback_interface_only() -> None:
    rendezvous = Rendezvous(first_restarts(0))
    info = rendezvous.next_rendezvous()
    port = info.bootstrap_store_info.master_port  # type: ignore[union-attr]
    with open("/proc/net/tcp") as table:
        listening = [line.split()[1] for line in table if line.split()[3] == "0A" and f":{port:04X}" in line.split()[1]]
    assert listening == [f"0100007F:{port:04X}"]
    assert (info.rank, info.world_size) == (0, 1)


def test_used_port_is_replaced_with_a_warning(port: int) -> None:
    first, second = Rendezvous(first_restarts(0), port), Rendezvous(first_restarts(0), port)
    assert first.reserve() is None
    problem = second.reserve()
    assert problem is not None and problem.code == "FSDP-W711" and str(port) in problem.message
    second.next_rendezvous()
    first.next_rendezvous()
    assert first.address == f"127.0.0.1:{port}" != second.address


def test_machines_have_the_numbers_of_their_flags(two: list[MachinesRendezvous]) -> None:
    assert [each.machines.machine for each in two] == [0, 1]
    assert two[0].address == two[1].address
    assert two[0].machines.failure() is None


def test_second_meeting_has_another_store_for_ranks(two: list[MachinesRendezvous]) -> None:
    before = two[0].address
    two[1].restarts = ONCE
    at_once(*(each.next_rendezvous for each in two))
    assert two[0].address == two[1].address != before
    assert [each.restarts for each in two] == [ONCE, ONCE], "all take the failures that one machine knows"


def test_machine_that_does_not_come_back_is_an_error(port: int) -> None:
    machines = [machine(number, port, conf="timeout=4") for number in (0, 1)]
    at_once(*(each.next_rendezvous for each in machines))
    (found,) = at_once(machines[0].next_rendezvous)
    assert code_of(found) == "FSDP-E717"
    at_once(*(each.shutdown for each in machines))


def test_another_job_on_the_same_port_is_refused(two: list[MachinesRendezvous], port: int) -> None:
    other = machine(1, port, facts=FACTS | {"the script": "`other.py`"})
    (found,) = at_once(other.next_rendezvous)
    assert code_of(found) == "FSDP-E708" and "the script is `other.py` here, and `train.py` on another machine" in str(
        found
    )


def test_second_launcher_of_a_live_machine_is_refused(two: list[MachinesRendezvous], port: int) -> None:
    done = threading.Event()

    def live() -> None:
        while not done.wait(0.1):
            two[1].machines.failure()

    def second() -> None:
        try:
            machine(1, port).next_rendezvous()
        finally:
            done.set()

    _, found = at_once(live, second)
    assert code_of(found) == "FSDP-E719"


def test_two_machines_with_one_number_are_refused(port: int) -> None:
    """The second launcher is refused while the first one waits, and the run starts with the others."""
    machines = [machine(number, port, size=3) for number in (0, 1)]
    results: list[Any] = []
    waiting = threading.Thread(target=lambda: results.extend(at_once(*(each.next_rendezvous for each in machines))))
    waiting.start()
    while machines[1]._handler is None:
        pass
    (found,) = at_once(machine(1, port, size=3).next_rendezvous)
    assert code_of(found) == "FSDP-E719"
    last = machine(2, port, size=3)
    last.next_rendezvous()
    waiting.join()
    assert [each.machines.machine for each in (*machines, last)] == [0, 1, 2]
    at_once(*(each.shutdown for each in (*machines, last)))


def test_machines_that_wait_learn_why_they_do_not_start(port: int) -> None:
    first, other = machine(0, port), machine(1, port, facts=FACTS | {"the number of ranks": "2 on cpu"})
    results = at_once(first.next_rendezvous, other.next_rendezvous)
    at_once(first.shutdown, other.shutdown)
    assert [code_of(result) for result in results] == ["FSDP-E708", "FSDP-E708"]
    assert "the number of ranks is 1 on cpu here, and 2 on cpu on another machine" in str(results[0])
    assert "the number of ranks is 2 on cpu here, and 1 on cpu on another machine" in str(results[1])


def test_address_without_a_machine_is_refused_at_once() -> None:
    launch = LaunchSection(num_machines=2, machine_rank=1, main_process_ip="no.such.host.invalid", use_cpu=True)
    world = World(device="cpu", num_machines=2, machine_rank=1, num_local=1)
    (found,) = at_once(MachinesRendezvous(launch, world, FACTS, RUN).next_rendezvous)
    assert code_of(found) == "FSDP-E707" and "no.such.host.invalid, is unknown here" in str(found)


def test_name_of_a_pod_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [socket.gaierror(-2, "Name or service not known")] * 2

    def look_up(*_: Any, **__: Any) -> list[Any]:
        if answers:
            raise answers.pop()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 23456))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    launch = LaunchSection(num_machines=2, main_process_ip="job-worker-0", main_process_port=23456)
    with pytest.raises(SpecError, match="job-worker-0, is unknown here"):
        _check_address(launch, is_host=False, seconds=60)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    _check_address(launch, is_host=False, seconds=60)
    assert not answers


def test_port_in_use_is_refused_at_once(port: int) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", port))
        used.listen()
        (found,) = at_once(machine(0, port).next_rendezvous)
    assert code_of(found) == "FSDP-E707" and f"cannot listen at 127.0.0.1:{port}" in str(found)


def test_differences_are_named() -> None:
    text = json.dumps(FACTS).encode()
    assert compare_facts(FACTS, text) is None
    assert compare_facts(FACTS | {"a setting of a newer version": "1"}, text) is None
    for name in FACTS:
        problem = compare_facts(FACTS | {name: "9"}, text)
        assert problem is not None and problem.code == "FSDP-E708"
        assert f"{name} is 9 here, and {FACTS[name]} on another machine." in problem.message
    for unreadable in (b"[1]", b"{"):
        problem = compare_facts(FACTS, unreadable)
        assert problem is not None and "another version of this package" in problem.message


def met_a_killed_host(port: int) -> MachinesRendezvous:
    """Machine 1, after it has met machine 0, which has hosted the store in a process of its own and was killed."""
    code = (
        f"import sys, time; sys.path[:0] = {sys.path!r}\n"
        f"from tests.programs.launcher.test_rendezvous import machine, ONCE\n"
        f"machine(0, {port}).next_rendezvous(); print('met', flush=True); time.sleep(60)"
    )
    host = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    other = machine(1, port, ONCE)
    other.next_rendezvous()
    assert host.stdout is not None and host.stdout.readline() == "met\n"
    host.kill()
    host.communicate()
    return other


def test_launcher_ends_without_threads_beside_a_lost_store(port: int) -> None:
    """A thread of torch in a request to the store would end the process with exit code 134."""
    other = met_a_killed_host(port)
    assert any("KeepAlive" in thread.name for thread in threading.enumerate())
    assert other.shutdown()
    assert not any("KeepAlive" in thread.name for thread in threading.enumerate())


def test_machine_with_the_store_that_was_killed_may_come_back(port: int) -> None:
    other = met_a_killed_host(port)
    while (announced := other.machines.failure()) is None:
        pass
    assert (announced.kind, announced.lost, other.machines.is_cut) == ("lost", 0, True)
    back = machine(0, port)
    for result in at_once(back.next_rendezvous, other.next_rendezvous):
        assert not isinstance(result, Exception), result
    assert back.restarts == other.restarts == ONCE
    at_once(back.shutdown, other.shutdown)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="an option of Linux")
def test_requests_to_a_store_out_of_reach_end_after_the_limit():
    # Without the option, a launcher waits in its request until the kernel sends it again, minutes after the link is up.
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    _limit_silence(f"127.0.0.1:{server.port}", 7)
    limits = []
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == server.port:
            with socket.socket(fileno=os.dup(connection.fd)) as own:
                limits.append(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    assert len(limits) == 2 and set(limits) == {7000}  # the master has a client of its own
    client.set("still", "open")
    assert server.get("still") == b"open"
