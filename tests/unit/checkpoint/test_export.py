"""``hf-fsdp export`` finds the checkpoint by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import saved
from safetensors import safe_open

from hf_fsdp_plugin.cli.main import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two complete checkpoints, of which the first was the best, and a third that was cut off."""
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


def test_the_newest_complete_checkpoint_is_written(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert {"embed.weight", "norm.weight"} <= names(tmp_path / "out")
    assert "checkpoint-30 is passed over" in capsys.readouterr().err


def test_the_best_one_is_found_where_the_run_is_now(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--best"]) == 0
    assert "checkpoint-10: " in capsys.readouterr().err, "what is said of the input names it"


def test_a_run_without_a_complete_checkpoint_says_why(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for step in (10, 20):
        (run / f"checkpoint-{step}" / "trainer_state.json").unlink()
    assert main(["export", str(run), str(tmp_path / "out"), "--json"]) == 1
    problem = json.loads(capsys.readouterr().out)["problems"][0]
    assert all(f"checkpoint-{step}" in problem["message"] for step in (10, 20, 30))
    assert not (tmp_path / "out").exists()


def test_a_folder_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "there is no checkpoint-N in it" in capsys.readouterr().err


def test_a_run_that_knows_no_best(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (run / "checkpoint-20" / "trainer_state.json").write_text("{}")
    saved.write_manifest(run / "checkpoint-20")
    assert main(["export", str(run), str(tmp_path / "out"), "--best"]) == 1
    assert "names no best checkpoint" in capsys.readouterr().err
