"""The leak check of tests/conftest.py reports each kind of leak, and nothing after a cleanup."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.leaks import ProcessState, differences, open_files_below


def _variable(stack: ExitStack) -> None:
    os.environ["HF_FSDP_LEAK"] = "1"
    stack.callback(os.environ.pop, "HF_FSDP_LEAK", None)


def _handler(stack: ExitStack) -> None:
    stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, print))


def _thread(stack: ExitStack) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="leaked")
    thread.start()
    stack.callback(thread.join)
    stack.callback(done.set)


def _child(stack: ExitStack) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stack.callback(child.communicate, b"\n")


def _file(stack: ExitStack) -> None:
    path = Path(tempfile.gettempdir()) / "leaked"
    path.touch()
    stack.callback(path.unlink)


def _process_group(stack: ExitStack) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)


@pytest.mark.parametrize(
    ("leak", "expected"),
    [
        (_variable, "environment variable HF_FSDP_LEAK='1'"),
        (_handler, "handler of SIGTERM"),
        (_thread, "thread leaked"),
        (_child, "child process"),
        (_file, "file "),
        (_process_group, "an initialized process group"),
    ],
)
def test_each_kind_of_leak_is_reported(leak: Callable[[ExitStack], None], expected: str) -> None:
    before = ProcessState.read()
    with ExitStack() as stack:
        leak(stack)
        assert [line for line in differences(before, ProcessState.read()) if line.startswith(expected)]
    assert not [line for line in differences(before, ProcessState.read()) if line.startswith(expected)]


def test_restoring_the_environment_removes_and_resets() -> None:
    os.environ["HF_FSDP_RESET"] = "before"
    before = ProcessState.read()
    os.environ.update(HF_FSDP_RESET="after", HF_FSDP_LEAK="1")
    before.restore()
    assert os.environ.pop("HF_FSDP_RESET") == "before"
    assert "HF_FSDP_LEAK" not in os.environ


def test_open_files_below_a_folder_are_reported(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w"):
        assert open_files_below(tmp_path) == [f"open file {tmp_path / 'open'}"]
    assert open_files_below(tmp_path) == []
