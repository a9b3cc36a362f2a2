"""The checkpoint to resume from, and warnings about what differs from the saved run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from hf_fsdp_plugin.integrations.resuming import find_checkpoint, warn_differences
from hf_fsdp_plugin.integrations.samples import kept_accumulation, samples_problem
from hf_fsdp_plugin.problems import CheckpointError
from tests.support import saved


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


@pytest.mark.parametrize(
    ("saved", "samples", "accumulation", "expected"),
    [
        ({"samples_per_step": 24}, 24, 2, 2),
        ({"samples_per_step": 24}, 12, 2, 4),
        ({"samples_per_step": 24}, 48, 2, 1),
        ({"samples_per_step": 24}, 96, 2, 1),  # one batch of each rank has more samples
        ({"samples_per_step": 32}, 9, 1, 4),  # 36 is nearer than 27
        ({"samples_per_step": 36, "first_samples_per_step": 32}, 16, 2, 4),
        ({}, 12, 2, 2),
        ({"samples_per_step": 24}, None, 2, 2),
    ],
)
def test_accumulation_keeps_samples_per_step(
    saved: dict[str, int], samples: int | None, accumulation: int, expected: int
) -> None:
    assert kept_accumulation(saved, {"samples_per_step": samples, "accumulation": accumulation}) == expected


def test_steps_of_an_epoch_and_other_orders_are_reported(tmp_path: Path) -> None:
    """With ``drop_last`` 4 ranks have 3 steps of 14 batches, and 2 ranks with twice the accumulation have 4."""
    saved = {"samples_per_step": 8, "accumulation": 1, "world_size": 4, "steps_per_epoch": 3}
    now = {"samples_per_step": 8, "accumulation": 2, "world_size": 2, "steps_per_epoch": 4}
    problem = samples_problem(tmp_path, saved, now)
    assert problem is not None and problem.code == "FSDP-W434" and "3 steps and has 4" in problem.message
    assert samples_problem(tmp_path, saved, {**now, "steps_per_epoch": 3}) is None
    assert samples_problem(tmp_path, saved, {**now, "steps_per_epoch": 3, "depends_on_accumulation": ["order"]})
    assert samples_problem(tmp_path, now, {**now, "depends_on_accumulation": ["order"]}) is None
