"""The attempt of a process: what it takes from its launcher, and what the ranks of all machines agree on."""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hf_fsdp_plugin.hangs.calls import record
from hf_fsdp_plugin.hangs.watch_files import RankFiles
from hf_fsdp_plugin.integrations import resuming as subject
from hf_fsdp_plugin.integrations.session import current_run
from hf_fsdp_plugin.runs.attempts import FailedAttempt, Restarts
from hf_fsdp_plugin.runs.identity import RunIdentity, attempt_folder, identify_run

AGENT = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "3"}


class World:
    """Ranks as threads, which a launcher starts again and again."""

    def __init__(self, patch: pytest.MonkeyPatch, *, machines: int = 1, local: int = 2) -> None:
        self.local, self.size = local, machines * local
        self.known, self.messages = threading.local(), 0
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(dist, "get_world_size", lambda: self.size)
        patch.setattr(dist, "get_rank", lambda: self.known.rank)
        patch.setattr(subject.agreement, "collective_preparation", lambda call: nullcontext())
        patch.setattr(subject.agreement, "gather_objects", self._gather)

    def run(self, attempt: int = 0, **more: str) -> list[Any]:
        """Return what each rank knows after it has agreed."""
        self._barrier, self._sent = threading.Barrier(self.size, timeout=30), [None] * self.size
        self._found: list[Any] = [None] * self.size
        more = {**AGENT, "TORCHELASTIC_RESTART_COUNT": str(attempt), "MASTER_PORT": f"{attempt + 1}", **more}
        ranks = [threading.Thread(target=self._be, args=(rank, more), name=str(rank)) for rank in range(self.size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        return self._found

    def _be(self, rank: int, more: dict[str, str]) -> None:
        self.known.rank = rank
        machine, local_rank = divmod(rank, self.local)
        # Machines have different agents and folders.
        logs = f"/logs/none_{machine}/attempt_0/{local_rank}/error.json"
        own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(self.local)}
        environ = {**more, **own, "TORCHELASTIC_ERROR_FILE": logs}
        attempt = subject.ProcessAttempt(environ)
        folder = attempt_folder(identify_run(environ, tuple(sys.argv)), environ)
        folder.mkdir(parents=True, exist_ok=True)
        attempt.begin(RankFiles(folder / f"rank_{rank}"))
        attempt.agree("Trainer.train")
        self._found[rank] = current_run().restarts

    def _gather(self, own: Any) -> list[Any]:
        self._sent[self.known.rank] = pickle.loads(pickle.dumps(own))
        self._barrier.wait()
        found = list(self._sent)
        self.messages = sum(known is not None for known, _ in found)
        self._barrier.wait()
        return found


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(current_run(), "restarts", Restarts())
    monkeypatch.setattr(current_run(), "identity", RunIdentity())
    yield
    record().close()


@pytest.mark.parametrize("machines", [1, 3])
def test_all_ranks_have_one_id_and_one_history(monkeypatch: pytest.MonkeyPatch, machines: int) -> None:
    world = World(monkeypatch, machines=machines)
    (first,) = set(world.run())
    assert "-none_" in first.run_id and (first.count, first.max_restarts) == (0, 3)
    (second,) = set(world.run(1))
    assert (second.run_id, second.count) == (first.run_id, 1)


def test_file_of_the_launcher_is_taken_without_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Restarts(run_id="launched", max_restarts=2, failures=(FailedAttempt(failure="rank 1: exit code 3"),))
    files = RankFiles(tmp_path / "rank_0")
    files.restarts.write_text(json.dumps(asdict(known)))
    world = World(monkeypatch)
    attempt = subject.ProcessAttempt(AGENT)
    attempt.begin(files)
    attempt.agree("Trainer.train")
    assert current_run().restarts == known and not world.messages


def test_process_without_a_launcher_has_no_attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    subject.ProcessAttempt({"RANK": "0", "WORLD_SIZE": "1"}).agree("Trainer.train")
    assert current_run().restarts == Restarts() and not list(tmp_path.iterdir()) and not world.messages
