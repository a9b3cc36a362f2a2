"""Fixtures of the tests of the integrations, which run in one process without ranks."""

from __future__ import annotations

import importlib.util
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.integrations.failure_watch import watch
from hf_fsdp_plugin.integrations.hooks import HOOKS
from hf_fsdp_plugin.integrations.session import current_run
from hf_fsdp_plugin.runs.attempts import Restarts

RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(scope="package", autouse=True)
def libraries() -> None:
    """Import the hooked modules before the leak check: one of their imports creates a folder."""
    for hook in (hook for hooks in HOOKS.values() for hook in hooks):
        if importlib.util.find_spec(hook.module.partition(".")[0]):
            importlib.import_module(hook.module)


@pytest.fixture
def uninstalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the test without hooks. The stock plugin's constructor sets this variable."""
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    hfp.uninstall()
    yield
    hfp.uninstall()


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Variables of a rank. Returns the folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    yield tmp_path
    watch().close()
    current_run().restarts = Restarts()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hf_fsdp")]
