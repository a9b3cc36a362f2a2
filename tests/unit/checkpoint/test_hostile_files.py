"""Hostile checkpoints: files that are too large, or not in the form that is expected."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from hf_fsdp_plugin.checkpoint.checking.completeness import _check_last_file
from hf_fsdp_plugin.checkpoint.errors import problems_of
from hf_fsdp_plugin.checkpoint.names import MANIFEST_NAME
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.tools.export.verb import find_checkpoint
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support import saved


@pytest.mark.parametrize("file", [MANIFEST_NAME, "pytorch_model_fsdp_0/.metadata"])
def test_huge_sparse_file_is_refused(tmp_path: Path, file: str) -> None:
    folder = saved.any_checkpoint(tmp_path / "ck", "sharded")
    with (folder / file).open("ab") as out:
        out.truncate(3 << 30)
    found = [problem.code for problem in verify(folder).problems if problem.severity == "error"]
    assert found == ["FSDP-E412"]


@pytest.mark.parametrize("text", ["[1]", '"x"', "5", "[" * 100_000])
def test_trainer_state_of_another_form_is_refused(checkpoint: Path, tmp_path: Path, text: str) -> None:
    (checkpoint / "trainer_state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"FSDP-E49[78]"):
        find_checkpoint(checkpoint.parent, best=True)
    found = [problem.code for problem in problems_of([partial(_check_last_file, checkpoint)])]
    assert found == ["FSDP-E453"]  # a resume refuses it too


@pytest.mark.parametrize("name", ["..", "/", "other", "checkpoint-1/../../secret", "a\0b"])
def test_best_checkpoint_is_a_checkpoint_of_the_run(checkpoint: Path, name: str) -> None:
    (checkpoint.parent / "other").mkdir()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": name}))
    with pytest.raises(CheckpointError, match="FSDP-E498"):
        find_checkpoint(checkpoint.parent, best=True)
