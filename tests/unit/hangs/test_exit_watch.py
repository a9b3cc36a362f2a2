"""Threads that keep a process running after its script has ended."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hf_fsdp_plugin.rank_variables import EXIT_LIMIT_VARIABLE, exit_limit

CODE = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from hf_fsdp_plugin.hangs.process_end import ExitWatch
exits = ExitWatch(0.3, notice=print, fail=print)
def poll():
    while True:
        print("ended early") if exits.poll() and not ended else time.sleep(0.05)
def upload():
    time.sleep({seconds})
if {seconds}:
    threading.Thread(target=upload, name="uploader").start()
ThreadPoolExecutor().submit(int).result()
ended = False
threading.Thread(target=poll, daemon=True).start()
time.sleep(0.2)
ended = True
"""


def run(seconds: float) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(seconds=seconds)], capture_output=True, text=True, timeout=60, check=False
    )
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def test_threads_are_named_before_the_process_fails() -> None:
    code, lines = run(60)
    assert code == 1
    assert ["FSDP-W741" in lines[0], "FSDP-E742" in lines[1]] == [True, True]
    assert all("non-daemon threads uploader (<string>:10, in upload)" in line for line in lines)


def test_idle_executors_do_not_hold_a_process() -> None:
    assert run(0) == (0, [])


@pytest.mark.parametrize("value", ["long", "0", "-1", "nan"])
def test_invalid_limit_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(EXIT_LIMIT_VARIABLE, value)
    with pytest.raises(ValueError):
        exit_limit()
    monkeypatch.setenv(EXIT_LIMIT_VARIABLE, "2.5")
    assert exit_limit() == 2.5
