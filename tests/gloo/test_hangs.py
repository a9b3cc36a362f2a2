"""Hangs of every kind, provoked on real ranks by ``scripts.bench hangs``: the output names rank, unit and place."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.cli.output import HANG
from scripts.bench.measure.hangs import EXPECTED, FAIL_AT_ONCE, LAUNCHERS, WAYS, provoke, train_healthily
from tests.support.launching import Done, launch, run, write

QUICK = {
    ("sleep", 1, "loop", "hf-fsdp"),
    ("sleep", 2, "loop", "two agents"),
}
CASES = [
    (kind, version, way, launcher)
    for launcher in LAUNCHERS
    for kind in EXPECTED
    for version in (1, 2)
    for way in WAYS.get(kind, ("loop", "trainer") if launcher == "hf-fsdp" else ("loop",))
    if launcher != "two agents" or kind not in FAIL_AT_ONCE
]


def slow_unless_quick(case: tuple[str, int, str, str]) -> Any:
    return pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)


@pytest.mark.parametrize(("kind", "version", "way", "launcher"), [slow_unless_quick(case) for case in CASES])
def test_hang_is_named(kind: str, version: int, way: str, launcher: str) -> None:
    outcome = provoke(kind, version, way, launcher)
    if not outcome.named and launcher != "hf-fsdp" and "gloo::EnforceNotMet" in outcome.output:
        pytest.xfail("gloo has ended a rank with SIGABRT, and the launcher the others before they compared their calls")
    assert outcome.named, outcome.output
    is_hang = outcome.code not in ("FSDP-E743", "FSDP-E734", "FSDP-E670")
    if launcher in ("hf-fsdp", "srun"):  # the others exit with 1
        assert (outcome.exit_code == HANG) == is_hang, outcome.output
    assert ("fsdp_hang_" in outcome.output) == is_hang, outcome.output
    if is_hang:
        assert outcome.output.count("hf-fsdp: hang:") == 1, outcome.output
    if is_hang and launcher == "torchrun":
        cause = outcome.output.partition("Root Cause")[2]
        assert f"[{outcome.code}]" in cause and "exitcode  : 75" in cause, outcome.output


@pytest.mark.slow
def test_slow_training_raises_no_alarm() -> None:
    found = train_healthily(2.0, 2)
    assert (found["exit_code"], found["alarms"]) == (0, 0)


EXCHANGES = """
    import os, time, torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    distribute_tensor(torch.ones(4), mesh, [Shard(0)]).full_tensor()
    what = __import__("sys").argv[1]
    if rank == 1:
        open("ready", "w").close()
        time.sleep(600)
    elif what == "dtensor":
        distribute_tensor(torch.ones(4), mesh, [Shard(0)]).sum().full_tensor()
    elif what == "receive":
        dist.recv(torch.ones(2), 1)
    elif what == "objects":
        dist.all_gather_object([None, None], {"a": 1})
    elif what == "monitored":
        dist.monitored_barrier()
"""
NAMED = {
    "dtensor": "rank 0 has waited for",
    "receive": "in recv from rank 1",
    "objects": "in all-gather",
    "monitored": "in monitored barrier",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", NAMED)
def test_collectives_of_the_script_are_seen(tmp_path: Path, what: str) -> None:
    write(tmp_path, EXCHANGES)
    done = launch(tmp_path, "--num_processes", "2", "--hang_timeout", "3", "train.py", what)
    assert done.returncode == HANG, done.stderr
    assert "rank 1 is late" in done.stderr and NAMED[what] in done.stderr and "time.sleep(600)" in done.stderr


RANKS = """
    import os, signal, sys, threading, time, torch, torch.distributed as dist
    import hf_fsdp_plugin
    rank, what = int(os.environ["RANK"]), sys.argv[1]
    def train():
        hf_fsdp_plugin.install()
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        if what == "stop" and rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "lock" and rank == 0:
            sum(range(10**13))  # does not release the lock of the interpreter
        elif what == "thread" and rank == 1:
            time.sleep(600)
        elif what == "raise" and rank == 1:
            raise ValueError("no batch")
        elif what == "exit" and rank == 1:
            sys.exit(3)
        elif what == "threads":
            threading.Thread(target=time.sleep, args=(8,), name="uploader").start()
        dist.all_reduce(torch.ones(1))
    if what == "thread":  # as Ray Train does
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    else:
        train()
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def torchrun(folder: Path, what: str, *flags: str, limit: str = "3", **variables: str) -> Done:
    write(folder, RANKS)
    done = run(folder, [*TORCHRUN, *flags, "train.py", what], HF_FSDP_HANG_TIMEOUT=limit, **variables)
    assert list(folder.glob("hf_fsdp_*")) == [] or done.returncode, "the last rank removes the files"
    return done


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("lock", r"sum\(range"),
        pytest.param("stop", "SIGSTOP", marks=pytest.mark.slow),
        pytest.param("thread", r"time\.sleep\(600\)", marks=pytest.mark.slow),
    ],
)
def test_rank_that_cannot_watch_is_named_by_another(tmp_path: Path, what: str, words: str) -> None:
    done = torchrun(tmp_path, what)
    late, other = (1, 0) if what == "thread" else (0, 1)
    assert re.search(rf"rank {late} is late: rank {other} has waited .*{words}.*FSDP-E728", done.stderr), done.stderr
    assert done.stderr.count("hf-fsdp: hang:") == 1 and "exitcode  : 75" in done.stderr, done.stderr


def test_exception_is_the_root_cause_of_torchrun(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "raise", limit="60")
    cause = done.stderr.partition("Root Cause")[2]
    assert "ValueError: no batch" in cause and re.search(r"train.py:\d+, in train", cause), done.stderr


@pytest.mark.slow
def test_nonzero_exit_is_recorded_by_the_program(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "exit", "-m", "hf_fsdp_plugin", limit="60")
    assert "exit code 3" in done.stderr.partition("Root Cause")[2], done.stderr


@pytest.mark.slow
def test_threads_after_the_script_are_named(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "threads", HF_FSDP_EXIT_TIMEOUT="7")
    assert "FSDP-W741" in done.stderr and "uploader" in done.stderr and "FSDP-E742" in done.stderr, done.stderr
