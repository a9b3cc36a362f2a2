"""A checkpoint of this package that was copied without its manifest is read as torch reads it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_fsdp_plugin.checkpoint.checking.completeness import why_incomplete
from hf_fsdp_plugin.checkpoint.formats.boxes import whole_box
from hf_fsdp_plugin.checkpoint.saved_state import LocalShard, ModelShards, OptimizerShards, Piece
from hf_fsdp_plugin.checkpoint.writing.dcp_files import complete_folders
from hf_fsdp_plugin.checkpoint.writing.file_parts import PartWriter
from hf_fsdp_plugin.checkpoint.writing.state_files import model_files, optimizer_files
from hf_fsdp_plugin.tools.inspect.summary import summarize
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support import saved

TENSORS = {"a": torch.arange(7.0), "b": torch.arange(100.0).reshape(10, 10), "c": torch.tensor(3, dtype=torch.int8)}


@pytest.fixture(params=["sharded", "full"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Model and optimizer as one rank writes them, without a manifest."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    shards = tuple(
        LocalShard(name, tensor.dtype, tuple(tensor.shape), (Piece(whole_box(tuple(tensor.shape)), tensor),))
        for name, tensor in TENSORS.items()
    )
    state = {shard.name: {"exp_avg": shard, "rounds": 3} for shard in shards}
    written = [
        model_files(ModelShards(shards, {}), request.param),
        optimizer_files(OptimizerShards(state, ({"params": list(TENSORS), "lr": 0.1},))),
    ]
    for files in written:
        PartWriter().write(tmp_path / "ck", files.parts)
        complete_folders(tmp_path / "ck", [files.entries])
    return tmp_path / "ck"


def test_checkpoint_without_its_manifest_is_not_damaged(checkpoint: Path) -> None:
    verdict = verify(checkpoint)
    assert saved.errors(verdict) == []
    assert any("has no fsdp_manifest.json" in text and "FSDP-N474" in text for text in saved.notes(verdict))
    assert why_incomplete(checkpoint) is None


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_0", "optimizer_0"])
def test_copied_folder_has_no_damaged_archives(checkpoint: Path, tmp_path: Path, name: str) -> None:
    if not (checkpoint / name).is_dir():
        pytest.skip("a full checkpoint has no folder of its model")
    shutil.copytree(checkpoint / name, tmp_path / "copy")
    found = {problem.code for problem in verify(tmp_path / "copy").problems if problem.severity == "error"}
    assert found == (set() if name == "pytorch_model_fsdp_0" else {"FSDP-E451"})  # an optimizer has no model


@pytest.mark.parametrize(("names", "ranks"), [(("rng_state_0.pth", "rng_state_1.pth"), 2), ((), 3)])
def test_ranks_are_counted_by_their_random_states(tmp_path: Path, names: tuple[str, ...], ranks: int) -> None:
    """Without them, by the files with shards, of which there is one more."""
    checkpoint = saved.local_checkpoint(tmp_path / "ck")
    (checkpoint / "fsdp_manifest.json").unlink()
    for name in names:
        torch.save({}, checkpoint / name)
    assert summarize(checkpoint).world_size == ranks
