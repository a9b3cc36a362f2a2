"""The staging folder of a save, and recovery from an interrupted commit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from hf_fsdp_plugin.checkpoint import folders
from hf_fsdp_plugin.checkpoint.checking.completeness import why_incomplete
from hf_fsdp_plugin.checkpoint.folders import recover_interrupted_commit, recover_run, remove_checkpoint
from hf_fsdp_plugin.checkpoint.writing.staging_folder import StagingFolder
from hf_fsdp_plugin.problems import CheckpointError


@pytest.mark.parametrize("rank", [0, 1])
def test_staging_folder_is_seen_by_all_ranks(rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no process group, so rank 1 is the only rank, and no rank 0 creates the folder."""
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(folders, "TIMEOUT", 0.0)
    staging = StagingFolder(tmp_path / "checkpoint-4")
    if rank == 0:
        staging.create()
        assert list(staging.folder.iterdir()) == []
        return
    with pytest.raises(CheckpointError) as caught:
        staging.create()
    assert [problem.code for problem in caught.value.problems] == ["FSDP-E405"]


def test_rename_is_durable_before_the_replaced_folder_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, final = tmp_path / ".checkpoint-4.saving", tmp_path / "checkpoint-4"
    for path in (folder, final):
        path.mkdir()
        (path / "name").write_text(path.name)
    synced: list[tuple[Path, list[str]]] = []
    monkeypatch.setattr(folders, "sync", lambda path: synced.append((path, sorted(os.listdir(tmp_path)))))
    replaced = folders.put_in_place(folder, final)
    assert synced == [(tmp_path, [".checkpoint-4.replaced", "checkpoint-4"])]
    assert replaced is not None and (replaced / "name").read_text() == "checkpoint-4"
    assert (final / "name").read_text() == ".checkpoint-4.saving"


@pytest.mark.parametrize("committed", [True, False])
def test_interrupted_commit_is_recovered(committed: bool, tmp_path: Path) -> None:
    final, replaced = tmp_path / "checkpoint-4", tmp_path / ".checkpoint-4.replaced"
    replaced.mkdir()
    (replaced / "optimizer.bin").write_text("old")
    (replaced / "plots").mkdir()
    (replaced / "plots" / "loss.svg").write_text("mine")
    if committed:
        final.mkdir()
        (final / "optimizer.bin").write_text("new")
    recover_interrupted_commit(final)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
    assert (final / "optimizer.bin").read_text() == ("new" if committed else "old")
    assert (final / "plots" / "loss.svg").read_text() == "mine"


def test_recover_run_removes_staging_folders_of_its_prefix(tmp_path: Path) -> None:
    for name in (".checkpoint-4.saving", ".checkpoint-3.removed.saving", ".other.saving", "checkpoint-2"):
        (tmp_path / name).mkdir()
    recover_run(tmp_path, "checkpoint-")
    assert {path.name for path in tmp_path.iterdir()} == {".other.saving", "checkpoint-2"}


def test_remove_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-2" / "optimizer_0").mkdir(parents=True)
    remove_checkpoint(tmp_path / "checkpoint-2")
    assert list(tmp_path.iterdir()) == []


def test_removed_link_leaves_its_target(tmp_path: Path) -> None:
    """An earlier removal may have left a link, which a later one removes too."""
    target = tmp_path / "disk"
    target.mkdir()
    for name in ("checkpoint-2", ".checkpoint-2.removed.saving"):
        (tmp_path / name).symlink_to(target)
    remove_checkpoint(tmp_path / "checkpoint-2")
    assert os.listdir(tmp_path) == ["disk"]


@pytest.mark.parametrize("exists", [False, True])
def test_link_to_staging_folder_is_replaced_or_removed(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    final = tmp_path / "checkpoint-4"
    if exists:
        final.mkdir()
        (final / "optimizer.bin").write_text("old")
    for is_interrupted in (True, False):
        staging = StagingFolder(final, linked=True)
        staging.create()
        (final / "optimizer.bin").write_text("new")
        assert (staging.folder / "optimizer.bin").read_text() == "new" and folders.is_staging_link(final)
        assert why_incomplete(final) is not None
        if is_interrupted:
            recover_run(tmp_path, "checkpoint-")
            assert os.listdir(tmp_path) == (["checkpoint-4"] if exists else [])
            assert not exists or (final / "optimizer.bin").read_text() == "old"
        else:
            replaced = folders.put_in_place(staging.folder, final)
            assert (replaced is not None) == exists and not final.is_symlink()
            assert (final / "optimizer.bin").read_text() == "new"


def test_discarded_link_restores_the_replaced_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    final = tmp_path / "checkpoint-4"
    final.mkdir()
    staging = StagingFolder(final, linked=True)
    staging.create()
    staging.discard()
    assert os.listdir(tmp_path) == ["checkpoint-4"] and final.is_dir() and not final.is_symlink()
