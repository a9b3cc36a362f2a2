"""The search for the devices of this machine starts a process with torch only if there may be some."""

from __future__ import annotations

import importlib.metadata
import subprocess
from typing import Any

import pytest

from hf_fsdp_plugin.launcher import world
from hf_fsdp_plugin.launcher.world import FoundDevices, find_devices


def finished(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """A process that has printed one accelerator."""
    return subprocess.CompletedProcess((), 0, '{"kind": "sdaa", "count": 4}\n', "")


@pytest.fixture(autouse=True)
def no_device_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_DEVICE_FILES", ())
    monkeypatch.setattr(subprocess, "run", finished)


def test_package_with_a_device_type_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [group])
    assert find_devices() == FoundDevices(kind="sdaa", count=4)


def test_nothing_is_started_without_files_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    assert find_devices() == FoundDevices()
