"""Incomplete checkpoints are recognised with the reason, and the newest complete one is found."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_fsdp_plugin.checkpoint.checking.completeness import (
    checkpoint_of,
    completeness_problems,
    first_complete,
    numbered_checkpoints,
    own_files,
    why_incomplete,
)
from hf_fsdp_plugin.checkpoint.formats.manifest import read_manifest, write_manifest
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME, SAVING
from hf_fsdp_plugin.checkpoint.writing import staging_folder
from tests.support import damages, saved


def codes(folder: Path) -> list[str]:
    return [problem.code for problem in completeness_problems(folder)]


def test_complete_checkpoints_have_no_reason(local, stock, hf):
    assert [why_incomplete(folder) for folder in (local, stock, hf)] == [None] * 3
    (hf / MANIFEST_NAME).unlink()
    assert why_incomplete(hf) is None


@pytest.mark.parametrize("file", ["trainer_state.json", "pytorch_model_fsdp_0/__1_0.distcp"])
def test_missing_file_of_the_manifest_is_reported(local, file):
    (local / file).unlink()
    assert codes(local) == ["FSDP-E457"] and (why_incomplete(local) or "").startswith(f"{file}: ")


def test_file_of_other_size_is_reported_with_both_sizes(local):
    (local / "trainer_state.json").write_text("{}")
    assert codes(local) == ["FSDP-E470"]
    assert why_incomplete(local) == "trainer_state.json: has 2 bytes; 19 were saved."


def test_several_problems_are_counted(local):
    shutil.rmtree(local / "optimizer_0")
    assert codes(local) == ["FSDP-E457"] * 4 and (why_incomplete(local) or "").endswith("(and 3 more problems)")


def test_manifest_without_files_hides_nothing(local):
    """A made-up manifest cannot make a checkpoint complete whose shards are missing."""
    manifest = read_manifest(local)
    assert manifest is not None
    write_manifest(local, replace(manifest, files=()))
    assert why_incomplete(local) is None
    shutil.rmtree(local / "pytorch_model_fsdp_0")
    assert why_incomplete(local) is not None


def test_staging_folder_is_incomplete(tmp_path, stock_once):
    assert SAVING == staging_folder.SAVING
    folder = staging_folder.StagingFolder(tmp_path / "checkpoint-9").folder
    shutil.copytree(stock_once, folder)
    for path in (folder, folder.parent):
        assert codes(path) == ["FSDP-E452"]


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("trainer_state.json", "FSDP-E452"), ("pytorch_model_fsdp_0/.metadata", "FSDP-E452"),
        ("pytorch_model_fsdp_0/__0_0.distcp", "FSDP-E457"), ("optimizer_0/__0_0.distcp", "FSDP-E457"),
    ],
)  # fmt: skip
def test_stock_checkpoint_without_required_file_is_incomplete(stock, file, code):
    (stock / file).unlink()
    assert codes(stock) == [code] and file.rpartition("/")[2] in (why_incomplete(stock) or "")


PARTS = [
    f"{folder}/{file}" for folder in ("pytorch_model_fsdp_0", "optimizer_0") for file in (".metadata", "__0_0.distcp")
]


@pytest.mark.parametrize("file", ["trainer_state.json", "scheduler.pt", "rng_state_1.pth", *PARTS])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.9])
def test_stock_checkpoint_with_truncated_file_is_incomplete(stock, file, keep):
    path = stock / file
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    assert codes(stock) == ["FSDP-E453"] and file.rpartition("/")[2] in (why_incomplete(stock) or "")


def test_archive_with_damaged_end_is_reported(stock):
    path = stock / "rng_state_1.pth"
    damages.flip(path, path.stat().st_size - 22)  # the signature of the end's record
    assert codes(stock) == ["FSDP-E453"] and (why_incomplete(stock) or "").startswith("rng_state_1.pth: ")


def test_checkpoint_without_optimizer_is_complete(stock):
    shutil.rmtree(stock / "optimizer_0")
    assert why_incomplete(stock) is None


def test_accelerate_checkpoint_requires_random_state(tmp_path, stock_once):
    folder = Path(shutil.copytree(stock_once, tmp_path / "checkpoint_3"))
    (folder / "trainer_state.json").unlink()
    assert codes(folder) == ["FSDP-E452"] and "random_states_0.pkl" in (why_incomplete(folder) or "")
    torch.save({"random": 1}, folder / "random_states_0.pkl")
    assert why_incomplete(folder) is None


@pytest.mark.parametrize("made", ["empty", "nowhere", "file", "other"])
def test_other_folders_are_incomplete(tmp_path, made):
    folder = tmp_path / made
    if made == "file":
        folder.write_text("x")
    elif made != "nowhere":
        folder.mkdir()
    if made == "other":
        (folder / "README.md").write_text("x")
    assert why_incomplete(folder)


def test_newest_complete_checkpoint_is_found(tmp_path):
    run = tmp_path / "run"
    for number in (9, 10, 100, 101):
        saved.local_checkpoint(run / f"checkpoint-{number}")
    (run / "checkpoint-100" / MANIFEST_NAME).write_text("{}")
    (run / "checkpoint-101" / "trainer_state.json").unlink()
    (run / "checkpoint-200").touch()
    (run / "checkpoint-best").mkdir()
    skipped: list[tuple[Path, str]] = []
    found = first_complete(numbered_checkpoints(run, "checkpoint-"), lambda *each: skipped.append(each))
    assert found == run / "checkpoint-10"
    assert [path.name for path, _ in skipped] == ["checkpoint-101", "checkpoint-100"]
    assert "trainer_state.json" in skipped[0][1] and MANIFEST_NAME in skipped[1][1]


def test_none_is_found_without_complete_checkpoint(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    skipped: list[Path] = []
    folders = numbered_checkpoints(tmp_path, "checkpoint-")
    assert first_complete(folders, lambda path, reason: skipped.append(path)) is None and skipped == folders != []
    assert numbered_checkpoints(tmp_path / "nowhere", "checkpoint-") == []


def test_checkpoints_are_found_by_prefix(tmp_path):
    saved.local_checkpoint(tmp_path / "checkpoint_2")
    saved.local_checkpoint(tmp_path / "checkpoint-1")
    assert [path.name for path in numbered_checkpoints(tmp_path, "checkpoint_")] == ["checkpoint_2"]
    assert [path.name for path in numbered_checkpoints(tmp_path, "checkpoint-")] == ["checkpoint-1"]


def test_part_belongs_to_enclosing_checkpoint(local, stock, tmp_path):
    assert checkpoint_of(local / "optimizer_0") == local
    assert checkpoint_of(stock / "pytorch_model_fsdp_0") == stock
    assert checkpoint_of(stock) == stock
    alone = Path(shutil.copytree(stock / "pytorch_model_fsdp_0", tmp_path / "alone" / "pytorch_model_fsdp_0"))
    assert checkpoint_of(alone) == alone


def test_files_of_nested_checkpoints_are_not_own_files(local, tmp_path):
    (tmp_path / ".checkpoint-30.saving").mkdir()
    (tmp_path / ".checkpoint-30.saving" / "a").touch()
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert list(own_files(tmp_path)) == [tmp_path / "config.json"]
