"""Which checkpoint a restarted run resumes from. The manifests are real, the other files are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.hangs.calls import record
from hf_fsdp_plugin.integrations import resuming as subject
from hf_fsdp_plugin.integrations.session import current_run
from hf_fsdp_plugin.runs.attempts import FailedAttempt, Restarts
from hf_fsdp_plugin.runs.identity import RunIdentity


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was restarted once, in its first call of ``train``."""
    run = Restarts(run_id="mine", max_restarts=3, failures=(FailedAttempt(failure="rank 0: exit code 1"),))
    monkeypatch.setattr(current_run(), "restarts", run)
    monkeypatch.setattr(current_run(), "num_trainings", 1)


def save(folder: Path, run: dict[str, Any], created: str = "2030-01-01T00:00:00+00:00") -> Path:
    from hf_fsdp_plugin.checkpoint.formats.manifest import Manifest, record_file, write_manifest

    folder.mkdir(parents=True)
    facts: dict[str, Any] = {"kind": "full", "backend": "fsdp2", "world_size": 1, "mesh": {}, "strategy": "full_shard"}
    facts |= {"step": 1, "asynchronous": False, "versions": {}, "settings": {}, "parameters": {}, "ties": ()}
    (folder / "config.json").write_text("{}")
    files = (record_file(folder, "config.json"),)
    write_manifest(folder, Manifest(**facts, created=created, files=files, batch={}, run=run))
    return folder


def mine(steps: Any, training: int = 1) -> dict[str, Any]:
    return {"id": "mine", "steps": steps, "training": training}


@pytest.mark.usefixtures("restarted")
def test_checkpoints_of_other_runs_are_not_resumed(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-900", {})
    save(tmp_path / "checkpoint-800", {"id": "other", "steps": 800, "training": 1})
    assert subject.checkpoint_after_restart(tmp_path, "checkpoint-") is None
    save(tmp_path / "checkpoint-40", mine(40))
    newest = save(tmp_path / "checkpoint-60", mine(60))
    save(tmp_path / "checkpoint-70", mine(70, training=2))
    assert subject.checkpoint_after_restart(tmp_path, "checkpoint-") == newest
    subject.continue_run(newest)
    assert record().counts.total == 60
    record().resume_at(0)


def test_requeued_job_resumes_from_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of a batch system that is started again has other agents of torch, and so another id."""
    save(tmp_path / "checkpoint-50", {"id": "other", "steps": 50, "training": 1, "job": "slurm-8-0-x"})
    own = save(tmp_path / "checkpoint-40", {"id": "before", "steps": 40, "training": 1, "job": "slurm-7-0-x"})
    monkeypatch.setattr(current_run(), "restarts", Restarts(run_id="now"))
    monkeypatch.setattr(current_run(), "num_trainings", 1)
    for requeued, expected in (("", None), ("slurm-7-0-x", own)):
        identity = RunIdentity(id="now", attempt=bool(requeued), job="slurm-7-0-x", requeued=requeued)
        monkeypatch.setattr(current_run(), "identity", identity)
        assert subject.checkpoint_after_restart(tmp_path, "checkpoint-") == expected
        assert hfp.newest_checkpoint(tmp_path, this_run=True) == expected
    assert subject.run_fact()["job"] == "slurm-7-0-x"
    record().resume_at(0)


def test_run_with_a_name_resumes_without_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_run(), "restarts", Restarts(run_id="mine"))
    monkeypatch.setattr(current_run(), "num_trainings", 1)
    monkeypatch.setattr(current_run(), "identity", RunIdentity(id="mine", given=True))
    assert subject.checkpoint_after_restart(tmp_path, "checkpoint-") is None
    own = save(tmp_path / "checkpoint-40", mine(40))
    assert subject.checkpoint_after_restart(tmp_path, "checkpoint-") == own
    subject.continue_run(own)
    assert record().counts.total == 40
    record().resume_at(0)


def test_first_start_takes_the_choice_of_the_script(tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-40", mine(40))
    assert subject.checkpoint_after_restart(tmp_path, "checkpoint-") is None


@pytest.mark.usefixtures("restarted")
def test_incomplete_checkpoint_is_skipped(tmp_path: Path) -> None:
    whole = save(tmp_path / "checkpoint-40", mine(40))
    damaged = save(tmp_path / "checkpoint-60", mine(60))
    (damaged / "fsdp_manifest.json").write_text("{")
    save(tmp_path / "checkpoint-50", mine("50"))  # a hostile manifest
    assert subject.checkpoint_after_restart(tmp_path, "checkpoint-") == whole
    record().resume_at(0)


@pytest.mark.usefixtures("restarted")
def test_newest_checkpoint_is_the_last_saved_one(tmp_path: Path) -> None:
    assert hfp.newest_checkpoint(tmp_path / "none") is None
    own = save(tmp_path / "epoch_1", mine(10), "2030-01-01T00:00:01+00:00")
    other = save(tmp_path / "step_5", {}, "2030-01-01T00:00:02+00:00")
    assert hfp.newest_checkpoint(tmp_path) == other
    assert hfp.newest_checkpoint(tmp_path, this_run=True) == own


def test_newest_checkpoint_needs_the_process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(hfp.SpecError) as caught:
        hfp.newest_checkpoint(tmp_path)
    assert caught.value.problems[0].code == "FSDP-E718"
