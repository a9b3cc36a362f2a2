"""How long the launcher waits for a rank after another one has failed."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.checkpoint.writing import exit_hooks
from hf_fsdp_plugin.hangs.rank_files import RankFiles
from hf_fsdp_plugin.launcher import rank_process, ranks
from hf_fsdp_plugin.launcher.rank_process import RankProcess
from hf_fsdp_plugin.launcher.ranks import Ranks


@pytest.mark.parametrize(("saves", "seconds"), [(False, rank_process.TERM_SECONDS), (True, rank_process._SAVE_SECONDS)])
def test_rank_that_writes_a_checkpoint_has_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: bool, seconds: float
) -> None:
    process: Any = None
    rank = RankProcess(rank=1, process=process, files=RankFiles(tmp_path / "rank1"), tail=deque())
    if saves:
        rank.files.saving.touch()
    sent: list[str] = []
    monkeypatch.setattr(RankProcess, "send", lambda rank, number: sent.append("SIGTERM"))
    monkeypatch.setattr(RankProcess, "kill_group", lambda rank: sent.append("SIGKILL"))
    monkeypatch.setattr(Ranks, "_running", lambda launched: [rank])
    launched = object.__new__(Ranks)
    for now in (ranks._SETTLE_SECONDS + 0.1, ranks._SETTLE_SECONDS + seconds, ranks._SETTLE_SECONDS + seconds + 0.2):
        launched._stop_after_failure(now)
    assert sent == ["SIGTERM", "SIGKILL"]


def test_ranks_have_longer_than_their_own_handler_waits() -> None:
    assert rank_process._SAVE_SECONDS > exit_hooks._SIGTERM_TIMEOUT
