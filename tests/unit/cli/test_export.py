"""``hf-fsdp export``: selects the newest or the best checkpoint of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.support import saved


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


def test_newest_complete_checkpoint_is_exported(run: Path, tmp_path: Path, hf_fsdp: Callable) -> None:
    code, _, err = hf_fsdp("export", run, tmp_path / "out")
    assert code == 0 and "checkpoint-30 is skipped: " in err
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        assert {"embed.weight", "norm.weight"} <= set(file.keys())


def test_best_checkpoint_of_a_moved_run_is_exported(run: Path, tmp_path: Path, hf_fsdp: Callable) -> None:
    code, _, err = hf_fsdp("export", run, tmp_path / "out", "--best")
    assert code == 0 and "checkpoint-10: " in err, "problems name the exported checkpoint"


def test_run_without_complete_checkpoint_is_refused(run: Path, tmp_path: Path, hf_fsdp: Callable) -> None:
    for step in (10, 20):
        (run / f"checkpoint-{step}" / "trainer_state.json").unlink()
    code, out, _ = hf_fsdp("export", run, tmp_path / "out", "--json")
    problem = json.loads(out)["problems"][0]
    assert (code, problem["code"]) == (1, "FSDP-E497")
    assert all(f"checkpoint-{step}" in problem["message"] for step in (10, 20, 30))
    assert not (tmp_path / "out").exists()


def test_folder_without_checkpoints_is_refused(tmp_path: Path, hf_fsdp: Callable) -> None:
    code, _, err = hf_fsdp("export", tmp_path, tmp_path / "out")
    assert code == 1 and "[FSDP-E496]" in err


def test_run_without_best_checkpoint_is_refused(run: Path, tmp_path: Path, hf_fsdp: Callable) -> None:
    (run / "checkpoint-20" / "trainer_state.json").write_text("{}")
    saved.write_manifest(run / "checkpoint-20")
    code, _, err = hf_fsdp("export", run, tmp_path / "out", "--best")
    assert code == 1 and "[FSDP-E498]" in err
