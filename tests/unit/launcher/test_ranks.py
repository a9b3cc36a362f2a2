"""How long the launcher waits for a rank after another one has failed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hf_fsdp_plugin.hangs.watch_files import RankFiles
from hf_fsdp_plugin.launcher.rank_processes import RankProcess
from hf_fsdp_plugin.time_limits import SAVE, SETTLE, TERM


@pytest.mark.parametrize(("saves", "seconds"), [(False, TERM), (True, SAVE)])
def test_rank_that_writes_a_checkpoint_has_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: bool, seconds: float
) -> None:
    rank = RankProcess(rank=1, pid=0, files=RankFiles(tmp_path / "rank_1"))
    if saves:
        rank.files.saving.touch()
    sent: list[str] = []
    monkeypatch.setattr(RankProcess, "send", lambda rank, number: sent.append("SIGTERM"))
    monkeypatch.setattr(RankProcess, "kill", lambda rank: sent.append("SIGKILL"))
    for now in (
        SETTLE + 0.1,
        SETTLE + seconds,
        SETTLE + seconds + 0.2,
    ):
        rank.stop(now)
    assert sent == ["SIGTERM", "SIGKILL"]


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_exit_is_seen_and_left_to_torch(tmp_path: Path, code: str, expected: int) -> None:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", code], start_new_session=True)
    rank = RankProcess(rank=0, pid=process.pid, files=RankFiles(tmp_path / "rank_0"))
    while rank.is_running:
        pass
    assert (rank.code, rank.has_failed, process.wait()) == (expected, True, expected)


def test_killed_rank_counts_as_stopped(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    )
    rank = RankProcess(rank=0, pid=process.pid, files=RankFiles(tmp_path / "rank_0"))
    rank.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and rank.result().stopped
