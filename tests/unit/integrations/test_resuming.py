"""Checks and warnings before a run resumes from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import saved
import torch.distributed as dist

from hf_fsdp_plugin.integrations.resuming import check_complete, warn_differences, warn_skipped
from hf_fsdp_plugin.problems import CheckpointError


def test_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    complete = saved.local_checkpoint(tmp_path / "checkpoint-2")
    check_complete(complete, "fix")
    (complete / "trainer_state.json").unlink()
    for path in (complete, tmp_path / "checkpoint-3"):
        with pytest.raises(CheckpointError) as caught:
            check_complete(path, "fix")
        assert [problem.code for problem in caught.value.problems] == ["FSDP-E431"]
        assert str(path) in str(caught.value)


def test_skipped_checkpoint_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warn_skipped([(tmp_path / "checkpoint-3", "it is empty")])
    printed = capsys.readouterr().err
    assert "FSDP-W432" in printed and str(tmp_path / "checkpoint-3") in printed and "it is empty" in printed


@pytest.mark.parametrize(
    ("world_size", "samples", "codes"),
    [(2, 8, []), (4, 8, ["FSDP-W433"]), (1, 4, ["FSDP-W433", "FSDP-W434"]), (2, 4, ["FSDP-W434"])],
)
def test_differences_from_the_saved_run_are_reported(
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
