"""The time in the manifest of a checkpoint."""

from __future__ import annotations

import datetime
from types import SimpleNamespace

import pytest

from hf_fsdp_plugin.checkpoint.writing import state_files


def test_time_of_save_does_not_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    first = state_files.time_of_save()
    set_back = SimpleNamespace(now=lambda zone: datetime.datetime.now(zone) - datetime.timedelta(hours=1))
    clock = SimpleNamespace(datetime=set_back, timedelta=datetime.timedelta, UTC=datetime.UTC)
    monkeypatch.setattr(state_files, "datetime", clock)
    assert first <= state_files.time_of_save()


def test_time_of_save_is_the_time() -> None:
    saved = datetime.datetime.fromisoformat(state_files.time_of_save())
    assert abs(datetime.datetime.now(datetime.UTC) - saved) < datetime.timedelta(seconds=5)
