"""The part of tests/unit/hangs/test_hang_watch.py that starts processes or computes for seconds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import hf_fsdp_plugin.time_limits as time_limits
from hf_fsdp_plugin.cli.output import HANG
from hf_fsdp_plugin.hangs import hang_watch
from hf_fsdp_plugin.hangs.calls import CallRecord, RankCalls, read_calls
from hf_fsdp_plugin.hangs.hang_cause import Diagnosis
from hf_fsdp_plugin.hangs.hang_queries import HangQueries
from hf_fsdp_plugin.hangs.hang_texts import found_hang, hang_problem
from hf_fsdp_plugin.hangs.hang_watch import HangFinder, write_hang
from hf_fsdp_plugin.hangs.watch_files import FoundHang, RankFiles, is_halted, processor_use
from hf_fsdp_plugin.runs.failures import AttemptResult, tell_failure
from tests.unit.hangs.test_hang_watch import LIMIT, queries_of

SLEEPS = "import time; time.sleep(60)"
WORKS = "while True: pass"
SPINS = "sum(iter(int, 1))"  # as a thread that waits for a device: it uses a core, and no new memory
ALLOCATES = "while True: bytearray(64 << 20)"
STARTS_WORKER = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
ENDS = "pass"


class Group:
    """A process group of two ranks, whose time-out is known."""

    group_name = "0"


@dataclass
class Rank:
    """A process that records nothing, and the record that stands for it."""

    rank: int
    process: subprocess.Popen[bytes]
    files: RankFiles
    record: CallRecord

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_gone(self) -> bool:
        return self.process.poll() is not None

    def request_stacks(self) -> None:
        pass


Make = Callable[..., list[Rank]]


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: "gloo")
    monkeypatch.setattr("hf_fsdp_plugin.torch_private.functions.timeout_of", lambda group: None)
    made: list[Rank] = []

    def make(late: str = SLEEPS) -> list[Rank]:
        for number, program in enumerate((SLEEPS, late)):
            # A process that starts is busy, and on a busy machine it takes long to start.
            command = [sys.executable, "-c", f"print(flush=True)\n{program}"]
            process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
            assert process.stdout is not None
            with process.stdout as output:
                output.readline()
            made.append(Rank(number, process, RankFiles(tmp_path / f"rank_{number}"), CallRecord()))
        deadline = time.monotonic() + 20
        used = {WORKS: "seconds", ALLOCATES: "seconds", STARTS_WORKER: "seconds_of_children"}.get(late)
        while used and not getattr(processor_use([process.pid])[process.pid], used) and time.monotonic() < deadline:
            time.sleep(0.05)
        for rank in made:
            rank.record.open(rank.files.calls)
            rank.record.begin(Group(), "barrier", None)  # type: ignore[arg-type]
        made[0].record.waits(made[0].record.begin(Group(), "all-reduce", None))  # type: ignore[arg-type]
        return made

    yield make
    for rank in made:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)  # with the processes that it has started
        rank.process.wait()
        rank.record.close()


def watch_for(ranks: list[Rank], seconds: float, **options: object) -> tuple[Diagnosis | None, list[str]]:
    notices: list[str] = []
    watch = HangFinder(
        **{  # type: ignore[arg-type]
            "limit": LIMIT,
            "is_strict": True,
            "hang_queries": HangQueries(),
            "notice": lambda notice: notices.append(str(notice)),
            **options,
        }
    )
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (hang := watch.poll(ranks)) is not None:
            return hang, notices
        time.sleep(0.02)
    return None, notices


def test_late_rank_is_reported_after_the_limit(ranks: Make, tmp_path: Path) -> None:
    both = ranks()
    assert watch_for(both, LIMIT / 2)[0] is None
    hang, _ = watch_for(both, 20.0)
    assert hang is not None and hang_problem(hang).code == "FSDP-E728" and hang.ranks == (1,)
    path = write_hang(hang, tmp_path, limit=LIMIT)
    assert path is not None and path.parent == tmp_path
    dump = json.loads(path.read_text())
    assert dump["ranks"] == [1] and dump["waiting"][0]["operation"] == "all-reduce" and dump["code"] == "FSDP-E728"
    assert [rank["rank"] for rank in dump["calls_of_ranks"]] == [0, 1]
    found = found_hang(hang, path)
    assert str(path) in found.text and found.same_as == "FSDP-E728 in all-reduce of "
    file = tmp_path / "hang.json"
    assert FoundHang.read(file) is None
    assert found.claim(file) and FoundHang.read(file) == found
    assert not found.claim(file), "only one rank reports the hang"
    assert list(tmp_path.glob("hang.json*")) == [file]
    result = AttemptResult(exits=(), hang=found)
    assert result.exit_code == HANG and tell_failure(result) == found.text
    assert AttemptResult(exits=(), remote_failure=found.message, has_remote_hang=True).exit_code == HANG


def test_wait_that_ends_is_not_reported(ranks: Make) -> None:
    both = ranks()
    timer = threading.Timer(LIMIT * 0.7, both[0].record._words.__setitem__, (3, 0))
    timer.start()
    hang, notices = watch_for(both, LIMIT * 3)
    timer.join()
    assert hang is None and notices == []


def test_busy_rank_is_only_named_without_a_flag(ranks: Make) -> None:
    hang, notices = watch_for(ranks(WORKS), 5.0, is_strict=False, limit=2.0)  # long enough on a busy machine
    assert hang is None and len(notices) == 1 and "FSDP-W732" in notices[0] and "rank 1" in notices[0]


@pytest.mark.parametrize(
    ("late", "is_busy"), [(SPINS, False), (SLEEPS, False), (ALLOCATES, True), (STARTS_WORKER, True)]
)
def test_rank_on_accelerator_is_busy_if_it_makes_progress(
    ranks: Make, monkeypatch: pytest.MonkeyPatch, late: str, is_busy: bool
) -> None:
    monkeypatch.setattr("torch.distributed.get_backend", lambda group: "nccl")
    both = ranks(late)
    assert all(read_calls(rank.rank, rank.files.calls).on_accelerator for rank in both)
    both[0].record.waited()
    hang, notices = watch_for(both, 5.0 if is_busy else 30.0, is_strict=False, limit=2.0)
    assert (hang is None) == is_busy
    assert [notice for notice in notices if "FSDP-W732" in notice] == notices and len(notices) == is_busy


def test_rank_that_reads_files_is_only_named(ranks: Make, tmp_path: Path) -> None:
    both = ranks()
    both[1].files.stacks.write_text(
        f'main 0x1\nThread 0x1 (most recent call first):\n  File "{tmp_path / "train.py"}", line 2 in <module>\n'
    )
    (tmp_path / "train.py").write_text("import json\nconfig = json.loads(file.read())\n")
    hang, notices = watch_for(both, 5.0, is_strict=False)
    assert hang is None
    assert len(notices) == 1 and "FSDP-W732" in notices[0] and "waits for files or data" in notices[0]


def test_busy_rank_is_a_hang_with_a_flag(ranks: Make) -> None:
    hang, _ = watch_for(ranks(WORKS), 20.0)
    assert hang is not None and hang.ranks == (1,) and hang.is_busy


def test_sleeping_rank_is_a_hang_without_a_flag(ranks: Make) -> None:
    hang, _ = watch_for(ranks(), 20.0, is_strict=False)
    assert hang is not None and not hang.is_busy


@pytest.mark.parametrize(("late", "number"), [(SLEEPS, signal.SIGSTOP), (ENDS, None)])
def test_state_of_the_process_is_named(ranks: Make, late: str, number: int | None) -> None:
    both = ranks(late)
    if number is not None:
        os.kill(both[1].pid, number)
    hang, _ = watch_for(both, 20.0, is_strict=False)
    assert hang is not None and hang.ranks == (1,)
    assert ("SIGSTOP" if number is not None else "had exited before the end") in hang_problem(hang).message


def test_time_out_of_the_group_shortens_the_limit(ranks: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((timedelta(seconds=2), timedelta(seconds=2), timedelta(seconds=1)))
    monkeypatch.setattr("hf_fsdp_plugin.torch_private.functions.timeout_of", lambda group: next(seconds))
    both = ranks()
    hang, _ = watch_for(both, 20.0, limit=1000.0)
    assert hang is not None
    assert 1.0 <= hang.waiting.seconds < 15
    other = Group()
    other.group_name = "1"
    both[0].record.begin(other, "barrier", None)  # type: ignore[arg-type]
    assert hang_watch._timeout(read_calls(0, both[0].files.calls)) == 2.0, "another group has a shorter time-out"


@pytest.mark.slow
def test_standstill_is_noticed_once(ranks: Make) -> None:
    both = ranks()
    both[0].record.waited()
    hang, notices = watch_for(both, LIMIT * 14)
    assert hang is None and len(notices) == 1 and "FSDP-W733" in notices[0]


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "LOOK", 0.0)


def test_first_announcement_ends_all_machines(ranks: Make) -> None:
    store = dist.HashStore()
    mine, other = queries_of(store, 0, 4), queries_of(store, 1, 4)
    hangs = [FoundHang(text="all", message=f"rank {rank} hangs", same_as="") for rank in (3, 0)]
    assert other.announce(hangs[0], "machine 1") is hangs[0]
    first = mine.announce(hangs[1], "machine 0")
    assert first == mine.announced == hangs[0].of_machine("machine 1") and first.elsewhere
    assert first.message == "machine 1: rank 3 hangs" and first.text.endswith(f"another failed: {first.message}")
    both = ranks()
    both[1].record.begin(Group(), "all-reduce", None)  # type: ignore[arg-type]
    hang, _ = watch_for(both, LIMIT * 3, hang_queries=queries_of(store, 2, 4))
    assert hang is None, "the machine that has announced a hang does not answer any more"


def test_stack_of_a_rank_on_another_machine_is_shown(ranks: Make, tmp_path: Path) -> None:
    store, both, ended = dist.HashStore(), ranks(), threading.Event()
    (tmp_path / "data.py").write_text("wait_for_lock()\n")
    frame = f'  File "{tmp_path / "data.py"}", line 1 in __getitem__'
    both[1].files.stacks.write_text(f"Stack (most recent call first):\n{frame}\n")
    asking, answering = queries_of(store, 0, 2), queries_of(store, 1, 2)

    def answer() -> None:
        other = HangFinder(limit=10 * LIMIT, is_strict=True, hang_queries=answering, notice=lambda notice: None)
        while not ended.wait(0.02):
            other.answer(both[1:])

    machine = threading.Thread(target=answer)
    machine.start()
    hang, _ = watch_for(both[:1], 20.0, hang_queries=asking)
    ended.set()
    machine.join()
    assert hang is not None and hang.ranks == (1,)
    shown = found_hang(hang, None).text
    assert "stack of rank 1:" in shown and "__getitem__" in shown and "wait_for_lock()" in shown
    dump = write_hang(hang, tmp_path, limit=LIMIT)
    assert dump is not None and [each["name"] for each in json.loads(dump.read_text())["stacks"]["1"]] == [
        "__getitem__"
    ]


def test_silent_machine_is_late(ranks: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(HangQueries):
        def ask(self, ranks: object, seconds: float = 0.0) -> list[RankCalls]:
            return [RankCalls(rank=rank, state="unreachable", detail="machine 1 (b)") for rank in (2, 3)]

    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda group: [0, 1, 2, 3])
    both = ranks()
    both[1].record.begin(Group(), "all-reduce", None)  # type: ignore[arg-type]
    hang, _ = watch_for(both, 20.0, hang_queries=Silent())
    assert hang is not None and hang.ranks == (2, 3)
    assert "is on machine 1 (b), which does not answer" in hang_problem(hang).message


def test_state_and_time_of_processes_are_read(ranks: Make) -> None:
    both = ranks(WORKS)
    assert not is_halted(both[0].pid)
    os.kill(both[0].pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while not is_halted(both[0].pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert is_halted(both[0].pid)
    before = processor_use([rank.pid for rank in both])
    while (
        processor_use([both[1].pid])[both[1].pid].seconds < before[both[1].pid].seconds + 0.05
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    after = processor_use([rank.pid for rank in both])
    assert after[both[0].pid] == before[both[0].pid]
    assert after[both[1].pid].seconds > before[both[1].pid].seconds
