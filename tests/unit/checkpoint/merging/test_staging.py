"""Interrupted and concurrent merges, and the replacement of an output."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.checkpoint.folders import replaced_path
from hf_fsdp_plugin.checkpoint.merging.merge import MergeOptions, merge
from hf_fsdp_plugin.checkpoint.merging.output import MergeStaging, staging_path
from hf_fsdp_plugin.problems import CheckpointError
from tests.support.merge_inputs import MODEL, TENSORS, assert_same, codes, messages, read, tree


def interrupt_after(num_files: int) -> Any:
    """Return a progress function that raises ``KeyboardInterrupt`` while the next file is written, in one buffer."""
    written = []

    def progress(what: str, count: int, total: int) -> None:
        written.append(count)
        if len(written) > num_files:
            raise KeyboardInterrupt

    return progress


def test_interrupted_merge_resumes_at_unfinished_file(checkpoint: Path, out: Path) -> None:
    options = MergeOptions(max_shard_size=130, dtype="float16")
    with pytest.raises(KeyboardInterrupt):
        merge(checkpoint, out, options, interrupt_after(2))
    assert not out.exists()
    finished = {path.name: path.stat().st_mtime_ns for path in staging_path(out).glob("*.safetensors")}
    assert len(finished) == 2
    merged = merge(checkpoint, out, options)
    assert merged.resumed == sorted(finished)
    assert all((out / name).stat().st_mtime_ns == changed for name, changed in finished.items())
    assert read(out).keys() == TENSORS.keys()
    assert not (out / "merge_plan.json").exists()
    assert "FSDP-W494" in codes(merged) and "of 'lm_head.weight'" in messages(merged)


@pytest.mark.parametrize("change", ["input", "options"])
def test_files_of_another_merge_are_not_used(change: str, checkpoint: Path, out: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        merge(checkpoint, out, MergeOptions(max_shard_size=250), interrupt_after(2))
    if change == "input":
        os.utime(checkpoint / MODEL / "__0_0.distcp", ns=(1, 1))
    dtype = None if change == "input" else "float64"
    merged = merge(checkpoint, out, MergeOptions(max_shard_size=250, dtype=dtype))
    assert merged.resumed == []
    expected = {name: whole.astype(dtype or whole.dtype) for name, whole in TENSORS.items() if whole.ndim}
    assert_same(read(out), {**expected, "model.steps": TENSORS["model.steps"]})


def test_full_disk_keeps_finished_files(checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    written = []

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        written.append(offset)
        if len(written) > 1:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, data, offset)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(os, "pwrite", full)
        merge(checkpoint, out, MergeOptions(max_shard_size=250))
    assert not out.exists()
    assert len(merge(checkpoint, out, MergeOptions(max_shard_size=250)).resumed) == 1


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


def test_merge_that_finishes_before_the_lock_is_kept(
    checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second merge opens the folder of the first, which is renamed to ``OUT`` before the second one locks it."""
    flock, others = fcntl.flock, [merge]

    def after_the_other_merge(lock: int, operation: int) -> None:
        if others:
            others.pop()(checkpoint, out, MergeOptions())
        flock(lock, operation)

    monkeypatch.setattr(fcntl, "flock", after_the_other_merge)
    with pytest.raises(CheckpointError, match="FSDP-E481"):
        merge(checkpoint, out, MergeOptions())
    assert_same(read(out), TENSORS)
    assert not staging_path(out).exists()
    with MergeStaging(out) as staging:
        assert staging.folder.is_dir()


def test_old_and_new_output_are_kept_after_interrupt(checkpoint: Path, out: Path) -> None:
    for folder in (out, replaced_path(out)):
        folder.mkdir()
        (folder / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="FSDP-E482"):
        merge(checkpoint, out, MergeOptions(force=True))
    assert tree(replaced_path(out)) == {"mine": b"mine"}
