"""Processes that a run leaves behind are found by its name, and ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_fsdp_plugin.launcher import orphan_processes
from hf_fsdp_plugin.launcher.orphan_processes import (
    RUN_VARIABLE,
    Guard,
    OrphanProcess,
    attempt_name,
    end_processes,
    processes_of,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds processes in /proc")

RUN = attempt_name()
SLEEP = "import time; print(flush=True); time.sleep(60)"
IGNORES_SIGTERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


def start(code: str, *, run: str = RUN) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        env={**os.environ, RUN_VARIABLE: run, "RANK": "3"},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with start(SLEEP) as process:
        yield process
        process.kill()


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with start(SLEEP, run="another run") as process:
        yield process
        process.kill()


def test_processes_of_a_run_are_found(child: subprocess.Popen[bytes], other: subprocess.Popen[bytes]) -> None:
    found = processes_of(RUN)
    assert [(process.pid, process.rank) for process in found] == [(child.pid, "3")]
    assert SLEEP in found[0].command


def test_processes_are_killed_at_once(child: subprocess.Popen[bytes], other: subprocess.Popen[bytes]) -> None:
    end_processes(RUN)
    assert child.wait(10) == -9
    assert other.poll() is None


@pytest.mark.parametrize(("code", "signal_number"), [(SLEEP, 15), (IGNORES_SIGTERM, 9)])
def test_processes_are_reported_before_sigterm(monkeypatch: pytest.MonkeyPatch, code: str, signal_number: int) -> None:
    monkeypatch.setattr(orphan_processes, "_PATIENCE_SECONDS", 0.2)
    reported: list[list[OrphanProcess]] = []
    with start(code) as process:
        end_processes(RUN, on_term=reported.append)
        assert process.wait(10) == -signal_number
    assert [[left.pid for left in each] for each in reported] == [[process.pid]]


def test_process_that_exits_in_time_is_not_reported() -> None:
    reported: list[list[OrphanProcess]] = []
    with start("import time; print(flush=True); time.sleep(0.2)") as process:
        end_processes(RUN, on_term=reported.append)
        assert (process.wait(10), reported) == (0, [])


def test_dismissed_guard_kills_nothing(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    Guard(RUN, tmp_path).close()
    assert child.poll() is None and tmp_path.exists()


def test_guard_kills_the_run_of_a_killed_launcher(child: subprocess.Popen[bytes], tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = (
        "import os, sys; from pathlib import Path; from hf_fsdp_plugin.launcher.orphan_processes import Guard;"
        "Guard(sys.argv[1], Path(sys.argv[2])); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, RUN, str(scratch)], check=False)
    assert child.wait(10) == -9
    deadline = time.monotonic() + 10
    while scratch.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not scratch.exists()
