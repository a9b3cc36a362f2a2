"""The bar of sharding counts the bytes of each unit, and appears on a terminal of rank 0 after two seconds."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from hf_fsdp_plugin.backends.loading import weight_loader
from hf_fsdp_plugin.backends.loading.weight_loader import with_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shard(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, rank: str, delay: float | None) -> list[Any]:
    model = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 3000, bias=False))
    units: Any = [SimpleNamespace(parameters=("0.weight",)), SimpleNamespace(parameters=("1.weight",))]
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("RANK", rank)
    if delay is not None:
        monkeypatch.setattr(weight_loader, "PROGRESS_DELAY", delay)
    return [done is unit for done, unit in zip(with_progress(units, model), units, strict=True)]


def test_bar_shows_bytes_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    assert shard(monkeypatch, stream, "0", 0.0) == [True, True]
    assert "sharding" in stream.getvalue() and "16.0M" in stream.getvalue() and "B/s" in stream.getvalue()


@pytest.mark.parametrize(
    ("stream", "rank", "delay"),
    [(Terminal(), "0", None), (Terminal(), "1", 0.0), (io.StringIO(), "0", 0.0)],
    ids=["short", "rank 1", "no terminal"],
)
def test_no_bar_is_shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, rank: str, delay: float | None) -> None:
    assert shard(monkeypatch, stream, rank, delay) == [True, True]
    assert "sharding" not in stream.getvalue()
