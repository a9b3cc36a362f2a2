"""Fails every test that leaks environment variables, threads, child processes, process groups or files."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from leaks import ProcessState, differences, open_files_below

_GRACE_SECONDS = 2.0
"""Threads and child processes that have been told to stop get this long."""


@pytest.fixture(autouse=True, scope="session")
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A temporary folder of this session alone, for this process and its children: what is left in it is a leak."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path_factory.mktemp("tmp"))
    yield
    tempfile.tempdir = None
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare the process before and after the test; fixtures of a wider scope are outside the comparison."""
    folder = Path(request.getfixturevalue("tmp_path")) if "tmp_path" in request.fixturenames else None
    before = ProcessState.read()
    yield
    deadline = time.monotonic() + _GRACE_SECONDS
    while (leaks := differences(before, ProcessState.read())) and time.monotonic() < deadline:
        if not any(line.startswith(("thread", "child process")) for line in leaks):
            break
        time.sleep(0.05)
    before.restore_environment()
    if folder is not None:
        leaks += open_files_below(folder)
    if leaks:
        pytest.fail("the test leaks " + "; ".join(leaks), pytrace=False)
