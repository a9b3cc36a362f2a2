"""The watch over records of made-up ranks, its questions to other machines, its messages and its dump."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.hangs import hang_queries, watch_files
from hf_fsdp_plugin.hangs.calls import RankCalls
from hf_fsdp_plugin.hangs.hang_queries import HangQueries, JobStore
from hf_fsdp_plugin.hangs.watch_files import ProcessorUse, processor_use
from hf_fsdp_plugin.rank_variables import DEFAULT_HANG_LIMIT, HANG_LIMIT_VARIABLE, hang_limit

LIMIT = 0.4


def test_use_of_a_session_contains_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fields of ``/proc/PID/stat`` after the name, of processes of sessions 7 and 9."""
    ticks = os.sysconf("SC_CLK_TCK")

    def stat_of(state: str, session: int, faults: int, seconds: int, of_ended: int) -> list[str]:
        times = [seconds * ticks, 0, of_ended * ticks, 0]
        return [state, "1", str(session), str(session), "0", "0", "0", str(faults), "0", "2", "0", *map(str, times)]

    known = {
        7: stat_of("S", 7, 10, 5, 1),
        8: stat_of("D", 7, 20, 3, 0),
        9: stat_of("R", 9, 0, 4, 0),
        10: stat_of("R", 7, 0, 0, 0),
    }
    monkeypatch.setattr(watch_files, "_stat", known.__getitem__)
    for pid in known:
        (tmp_path / str(pid)).mkdir()
    monkeypatch.setattr(watch_files, "Path", lambda path: tmp_path)
    assert processor_use([7]) == {7: ProcessorUse(9.0, 4.0, 36, True)}
    assert processor_use([9]) == {9: ProcessorUse(4.0, 0.0, 2, False)}


def queries_of(store: dist.Store, machine: int, world_size: int) -> HangQueries:
    """Of a machine with one rank, which registers."""
    made = HangQueries(JobStore(lambda: store), ranks=[machine], world_size=world_size)
    made._name = f"machine {machine}"
    assert not made.is_asked()
    return made


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "LOOK", 0.0)


def test_machines_answer_each_other_and_name_silent_ones() -> None:
    seconds = 2.0
    store = dist.HashStore()
    machines = [queries_of(store, machine, 4) for machine in range(3)]
    found: list[list[RankCalls] | None] = []
    thread = threading.Thread(target=lambda: found.append(machines[0].ask([RankCalls(rank=0)], seconds)))
    thread.start()
    deadline = time.monotonic() + 5
    while not machines[1].is_asked() and time.monotonic() < deadline:
        time.sleep(0.05)
    machines[1].answer([RankCalls(rank=1, place="here"), RankCalls(rank=2)])
    assert not machines[1].is_asked()
    thread.join()
    silent = RankCalls(rank=2, state="unreachable", detail="machine 2")
    unknown = RankCalls(rank=3, state="unreachable", detail="another machine")
    answer = RankCalls(rank=1, place="here", idle=1e9)
    assert found == [[answer, silent, unknown]], "each machine answers for its own ranks"


def test_waiting_machines_ask_for_one_number() -> None:
    """All machines of a job ask at the same time when it hangs, and the store has one process."""
    seconds = 1.0
    store = dist.HashStore()
    others = [queries_of(store, machine, 64) for machine in range(64)]
    checks: list[str] = []

    class Counted:
        def check(self, keys: list[str]) -> bool:
            checks.append(keys[0])
            return bool(store.check(keys))

        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

    others[0]._store = JobStore(Counted)
    answers = others[0].ask([RankCalls(rank=0)], seconds)
    assert answers is not None and [each.state for each in answers] == 63 * ["unreachable"]
    assert len([key for key in checks if key.startswith("1/")]) <= 63, "they are looked for when their number changes"


class CountedAnswers:
    """A store that counts the answers that machines write."""

    def __init__(self) -> None:
        self.store, self.number = dist.HashStore(), 0

    def set(self, key: str, value: str | bytes) -> None:
        self.number += key.partition("/")[0].isdecimal()
        self.store.set(key, value)

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)


@pytest.mark.parametrize("number", [8, 40])
def test_answers_grow_with_the_number_of_machines(number: int) -> None:
    """All machines want to ask at the same time."""
    store = CountedAnswers()
    machines = [queries_of(store, machine, number) for machine in range(number)]  # type: ignore[arg-type]
    results: list[list[RankCalls] | None] = [None] * number

    def watch(machine: int) -> None:
        results[machine] = machines[machine].ask([RankCalls(rank=machine)], 20.0)
        while not is_over.wait(0.05):
            if machines[machine].is_asked():
                machines[machine].answer([RankCalls(rank=machine)])

    is_over = threading.Event()
    threads = [threading.Thread(target=watch, args=(machine,)) for machine in range(number)]
    for thread in threads:
        thread.start()
        time.sleep(0.005)  # machines look for hangs twice per second, each at times of its own
    deadline = time.monotonic() + 30
    while not any(results) and time.monotonic() < deadline:
        time.sleep(0.1)
    is_over.set()
    for thread in threads:
        thread.join()
    found = next(result for result in results if result)
    assert {each.state for each in found} == {"running"} and len(found) == number - 1
    assert number - 1 <= store.number <= 9 * number


def test_request_that_does_not_end_blocks_no_other() -> None:
    """The host of the store is stopped: torch's requests have no limit of their own."""
    released = threading.Event()
    store = JobStore(lambda: released.wait(30))
    begin = time.monotonic()
    for _ in range(3):
        assert store.ask(lambda _: 1, 0.3) is None
    assert time.monotonic() - begin < 5
    assert len([each for each in threading.enumerate() if each.name == hang_queries.THREAD]) == 1
    assert not store.join(0.1)
    released.set()
    assert store.join(10) and store.ask(lambda _: 1) == 1
    store.close()
    assert store.ask(lambda _: 1) is None


def test_one_of_two_machines_that_ask_at_once_is_answered() -> None:
    store = dist.HashStore()
    found: dict[int, list[RankCalls] | None] = {}
    machines = [queries_of(store, machine, 2) for machine in (0, 1)]

    def ask(machine: int) -> None:
        own = [RankCalls(rank=machine)]
        found[machine] = machines[machine].ask(own)
        deadline = time.monotonic() + 10
        while len(found) < 2 and time.monotonic() < deadline:  # the watcher polls: the other may have asked later
            if machines[machine].is_asked():
                machines[machine].answer(own)
            time.sleep(0.01)

    threads = [threading.Thread(target=ask, args=(machine,)) for machine in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = {0: [RankCalls(rank=1, idle=1e9)], 1: [RankCalls(rank=0, idle=1e9)]}
    assert [machine for machine in found if found[machine] == answers[machine]]
    assert all(found[machine] in (None, answers[machine]) for machine in found), "the other one waits for what it finds"


@pytest.mark.parametrize(
    ("flag", "variable", "expected"),
    [
        (None, "", (DEFAULT_HANG_LIMIT, False)),
        ("30", "60", (30.0, True)),
        (None, "60.5", (60.5, True)),
        ("0", "", (0.0, True)),
    ],
)
def test_limit_is_read_from_flag_then_environment(
    monkeypatch: pytest.MonkeyPatch, flag: str | None, variable: str, expected: tuple[float, bool]
) -> None:
    monkeypatch.setenv(HANG_LIMIT_VARIABLE, variable)
    assert hang_limit(flag) == expected


@pytest.mark.parametrize("value", ["soon", "-1", "inf", "nan"])
def test_wrong_limit_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    with pytest.raises(ValueError, match="--hang_timeout"):
        hang_limit(value)
    monkeypatch.setenv(HANG_LIMIT_VARIABLE, value)
    with pytest.raises(ValueError, match=HANG_LIMIT_VARIABLE):
        hang_limit(None)
