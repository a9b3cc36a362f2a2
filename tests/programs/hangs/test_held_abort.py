"""A thread that aborts the process is held, so that another thread can say what the rank did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs the handlers of Linux")

PROGRAM = """
import ctypes, faulthandler, sys, threading, time
from hf_fsdp_plugin.hangs.python_stacks import HeldAbort
held = HeldAbort()
faulthandler.enable()
assert not held.has_begun()
what = sys.argv[1]

def watch():
    while not held.has_begun():
        time.sleep(0.02)
    print("held", flush=True)
    held.end()

threading.Thread(target=watch, daemon=True).start()
if what == "abort":
    ctypes.CDLL(None).abort()  # without the lock of the interpreter, as threads of gloo
elif what == "lock":
    ctypes.PyDLL(None).abort()
elif what == "release":
    faulthandler.disable()
    held.release()
    ctypes.CDLL(None).abort()
"""


def run(what: str) -> tuple[subprocess.CompletedProcess[str], float]:
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", PROGRAM, what], capture_output=True, text=True, timeout=60)
    return done, time.monotonic() - start


def test_other_thread_runs_before_the_process_ends() -> None:
    done, _ = run("abort")
    assert (done.returncode, done.stdout) == (-signal.SIGABRT, "held\n")
    assert done.stderr.count("Fatal Python error: Aborted") == 1


def test_process_ends_if_no_other_thread_can_run() -> None:
    done, seconds = run("lock")
    assert (done.returncode, done.stdout) == (-signal.SIGABRT, "") and seconds > signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr


def test_released_abort_ends_the_process_at_once() -> None:
    done, seconds = run("release")
    assert (done.returncode, done.stdout) == (-signal.SIGABRT, "") and seconds < signal.SIGABRT


def test_exit_without_abort_is_unchanged() -> None:
    done, _ = run("nothing")
    assert (done.returncode, done.stdout, done.stderr) == (os.EX_OK, "", "")
