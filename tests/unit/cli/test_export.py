"""``hf-fsdp export``: selects the newest or the best checkpoint of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import saved
from safetensors import safe_open

from hf_fsdp_plugin.cli.main import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two complete checkpoints, of which the first is the best one, and an incomplete third."""
    folder = tmp_path / "run"
    for step in (10, 20, 30):
        saved.local_checkpoint(folder / f"checkpoint-{step}")
    (folder / "checkpoint-30" / "trainer_state.json").unlink()
    best = {"global_step": 20, "best_model_checkpoint": "/elsewhere/run/checkpoint-10"}
    (folder / "checkpoint-20" / "trainer_state.json").write_text(json.dumps(best))
    saved.write_manifest(folder / "checkpoint-20")
    return folder


def names(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", "numpy") as file:
        return set(file.keys())


def test_newest_complete_checkpoint_is_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert {"embed.weight", "norm.weight"} <= names(tmp_path / "out")
    assert "checkpoint-30 is skipped: " in capsys.readouterr().err


def test_best_checkpoint_of_a_moved_run_is_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--best"]) == 0
    assert "checkpoint-10: " in capsys.readouterr().err, "problems name the exported checkpoint"


def test_run_without_complete_checkpoint_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for step in (10, 20):
        (run / f"checkpoint-{step}" / "trainer_state.json").unlink()
    assert main(["export", str(run), str(tmp_path / "out"), "--json"]) == 1
    problem = json.loads(capsys.readouterr().out)["problems"][0]
    assert problem["code"] == "FSDP-E497"
    assert all(f"checkpoint-{step}" in problem["message"] for step in (10, 20, 30))
    assert not (tmp_path / "out").exists()


def test_folder_without_checkpoints_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "[FSDP-E496]" in capsys.readouterr().err


def test_run_without_best_checkpoint_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (run / "checkpoint-20" / "trainer_state.json").write_text("{}")
    saved.write_manifest(run / "checkpoint-20")
    assert main(["export", str(run), str(tmp_path / "out"), "--best"]) == 1
    assert "[FSDP-E498]" in capsys.readouterr().err
