"""Fails every test that leaks environment variables, threads, child processes, process groups or files."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.leaks import ProcessState, leaks_since, open_files_below

# Before torch and transformers are imported. Ranks share the cores, so each has one thread. The models of the tests are
# in files, so nothing is looked up on the hub.
for name, value in (("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1"), ("TOKENIZERS_PARALLELISM", "false")):
    os.environ.setdefault(name, value)

# Imports leave next to no garbage, and the search for it takes a sixth of their time. Nor are later searches to look at
# what the collection of the tests has imported.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print a notice about what CI does not run, after a run of all tests."""
    if config.args == ["tests"] and not config.option.keyword and not config.option.collectonly:
        from scripts.last_runs import notice

        if text := notice():
            terminalreporter.write_line(f"notice: {text}", yellow=True)


# A busy machine must not fail a test, so that no example has a time limit.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True, scope="session")
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a separate temporary folder in this process and its children. A file that a test leaves in it is a leak."""
    folder = str(tmp_path_factory.mktemp("tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> None:
    """Let child processes be interrupted, even if a shell has started pytest in the background with SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def unlimited_columns() -> Iterator[None]:
    """Remove the width of the terminal, which shells and pytest-xdist export, so that no text is wrapped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        yield


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare the state of the process before and after a test. Fixtures of a wider scope are not compared."""
    folder = Path(request.getfixturevalue("tmp_path")) if "tmp_path" in request.fixturenames else None
    before = ProcessState.read()
    yield
    leaks = leaks_since(before)
    before.restore()
    if folder is not None:
        leaks += open_files_below(folder)
    if leaks:
        pytest.fail("the test leaks " + "; ".join(leaks), pytrace=False)
