"""Checks before a merge: output folders, disk space, incomplete checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.tools.merge.merge_plan import staging_path
from hf_fsdp_plugin.tools.merge.merging import MergeOptions, merge
from tests.support.merge_inputs import MODEL, tree

OUTPUTS = {
    "checkpoint": (".", "FSDP-E480"),
    "inside the checkpoint": ("merged", "FSDP-E480"),
    "around the checkpoint": ("..", "FSDP-E480"),
    "file": ("../notes.txt", "FSDP-E481"),
    "not empty": ("../full", "FSDP-E481"),
}


@pytest.mark.parametrize("place", OUTPUTS)
def test_output_that_overwrites_something_is_refused(place: str, checkpoint: Path) -> None:
    (checkpoint.parent / "notes.txt").write_text("mine")
    (checkpoint.parent / "full").mkdir()
    (checkpoint.parent / "full" / "mine").write_text("mine")
    before = tree(checkpoint.parent)
    where, code = OUTPUTS[place]
    with pytest.raises(CheckpointError, match=code):
        merge(checkpoint, checkpoint / where, MergeOptions(force=place != "not empty"))
    assert tree(checkpoint.parent) == before


def test_all_folder_problems_are_reported(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(CheckpointError) as caught:
        merge(tmp_path / "gone", tmp_path / "out", MergeOptions())
    assert [problem.code for problem in caught.value.problems] == ["FSDP-E450", "FSDP-E481"]


def test_incomplete_checkpoint_is_refused(checkpoint: Path, out: Path) -> None:
    (checkpoint / MODEL / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp.*FSDP-E483"):
        merge(checkpoint, out, MergeOptions())
    assert not staging_path(out).exists()
