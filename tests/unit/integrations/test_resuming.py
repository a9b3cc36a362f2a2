"""The checkpoint to resume from, and warnings about what differs from the saved run."""

from __future__ import annotations

from pathlib import Path

import pytest
import saved
import torch.distributed as dist

from hf_fsdp_plugin.integrations.resuming import find_checkpoint, warn_differences
from hf_fsdp_plugin.problems import CheckpointError


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)


def test_selected_checkpoint_must_be_complete(tmp_path: Path) -> None:
    complete = saved.local_checkpoint(tmp_path / "checkpoint-2")
    assert find_checkpoint(None, "checkpoint-", complete, fix="") == complete
    (complete / "trainer_state.json").unlink()
    for path in (complete, tmp_path / "checkpoint-3"):
        with pytest.raises(CheckpointError) as caught:
            find_checkpoint(None, "checkpoint-", path, fix="")
        assert [problem.code for problem in caught.value.problems] == ["FSDP-E431"]
        assert str(path) in str(caught.value)


def test_newest_complete_checkpoint_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_checkpoint(tmp_path, "checkpoint-", None, fix="") is None
    incomplete = tmp_path / "checkpoint-3"
    incomplete.mkdir()
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(tmp_path, "checkpoint-", None, fix="")
    assert [problem.code for problem in caught.value.problems] == ["FSDP-E606"]
    complete = saved.local_checkpoint(tmp_path / "checkpoint-2")
    assert find_checkpoint(tmp_path, "checkpoint-", None, fix="") == complete
    printed = capsys.readouterr().err
    assert "FSDP-W432" in printed and str(incomplete) in printed


@pytest.mark.parametrize(
    ("world_size", "samples", "codes"),
    [(2, 8, []), (4, 8, ["FSDP-W433"]), (1, 4, ["FSDP-W433", "FSDP-W434"]), (2, 4, ["FSDP-W434"])],
)
def test_differences_from_saved_run_are_reported(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    samples: int,
    codes: list[str],
) -> None:
    checkpoint = saved.local_checkpoint(tmp_path / "checkpoint-2")
    saved.write_manifest(checkpoint, world_size=2, batch={"samples_per_step": 8})
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    warn_differences(checkpoint, {"samples_per_step": samples})
    printed = capsys.readouterr().err
    assert [code for code in ("FSDP-W433", "FSDP-W434") if code in printed] == codes
