"""Interrupted and concurrent merges, and the replacement of an output."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_fsdp_plugin.checkpoint.folders import replaced_path
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.tools.merge.merge_plan import MergeStaging, staging_path
from hf_fsdp_plugin.tools.merge.merging import MergeOptions, merge
from tests.support.merge_inputs import tree


def test_interrupted_merge_leaves_nothing_behind(checkpoint: Path, out: Path) -> None:
    written = []

    def interrupt(what: str, count: int, total: int) -> None:
        written.append(count)
        if len(written) > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(checkpoint, out, MergeOptions(max_shard_size=130), interrupt)
    assert len(written) == 3 and not out.exists() and not staging_path(out).exists()


def test_files_of_a_killed_merge_are_removed(checkpoint: Path, out: Path) -> None:
    (staging_path(out) / "folder").mkdir(parents=True)
    (staging_path(out) / "model-00009-of-00009.safetensors").write_text("unfinished")
    merge(checkpoint, out, MergeOptions())
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]


def test_full_disk_leaves_nothing_behind(checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(os, "fsync", full)
        merge(checkpoint, out, MergeOptions(max_shard_size=250))
    assert not out.exists() and not staging_path(out).exists()


def test_force_replaces_the_output(checkpoint: Path, out: Path) -> None:
    out.mkdir()
    (out / "old.txt").write_text("old")
    merge(checkpoint, out, MergeOptions(force=True))
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert not replaced_path(out).exists()


def test_replaced_output_is_restored_after_interrupt(checkpoint: Path, out: Path) -> None:
    replaced_path(out).mkdir()
    (replaced_path(out) / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="FSDP-E481"):
        merge(checkpoint, out, MergeOptions())
    assert tree(out) == {"mine": b"mine"}


def test_concurrent_merge_is_refused(checkpoint: Path, out: Path) -> None:
    with MergeStaging(out), pytest.raises(CheckpointError, match="FSDP-E485"):
        merge(checkpoint, out, MergeOptions())
    merge(checkpoint, out, MergeOptions())


def test_output_of_a_merge_that_finishes_first_is_kept(
    checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(*_: object) -> None:
        out.mkdir(exist_ok=True)
        (out / "model.safetensors").write_text("of another merge")

    with pytest.raises(CheckpointError, match="FSDP-E481"):
        merge(checkpoint, out, MergeOptions(), finish)
    assert tree(out) == {"model.safetensors": b"of another merge"} and not staging_path(out).exists()


def test_old_and_new_output_are_kept_after_interrupt(checkpoint: Path, out: Path) -> None:
    for folder in (out, replaced_path(out)):
        folder.mkdir()
        (folder / "mine").write_text("mine")
    with pytest.raises(OSError):
        merge(checkpoint, out, MergeOptions(force=True))
    assert tree(replaced_path(out)) == {"mine": b"mine"}
