"""The format of docs/local_format.md: files of all ranks are combined, and contradictions are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hf_fsdp_plugin.checkpoint.formats.boxes import Box
from hf_fsdp_plugin.checkpoint.formats.local import METADATA_KEY
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.problems import CheckpointError


def local_part(folder: Path, rank: int, num_ranks: int = 2, piece: dict[str, Any] | None = None, **facts: Any) -> None:
    """Rows ``2 * rank`` and ``2 * rank + 1``, filled with the rank, of a tensor of ``2 * num_ranks`` rows."""
    folder.mkdir(exist_ok=True)
    pieces = {"p0": {"name": "_orig_mod.w", "shape": [2 * num_ranks, 3], "offsets": [2 * rank, 0], **(piece or {})}}
    description = {"rank": rank, "world_size": num_ranks, "pieces": pieces, "aliases": {"tied": "w"}, **facts}
    rows = np.full((2, 3), rank, np.float32)
    save_file({"p0": rows}, folder / f"0_rank{rank}.safetensors", {METADATA_KEY: json.dumps(description)})


def test_files_of_all_ranks_become_one_model(tmp_path: Path) -> None:
    for rank in range(2):
        local_part(tmp_path / "pytorch_model_fsdp_local", rank)
        values = {"values": {"w": {"rounds": rank}}, "groups": [{"params": ["w"], "lr": 0.1}]}
        local_part(tmp_path / "optimizer_local", rank, piece={"key": "exp_avg"}, **values)
    index = read_stored_model(tmp_path)
    assert index.format == "local"
    assert index.tensors.keys() == {"w", "tied"}
    tensor = index.tensors["w"]
    assert tensor.shape == (4, 3)
    assert [piece.box for piece in tensor.pieces] == [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    assert index.tensors["tied"].pieces == tensor.pieces
    for rank, piece in enumerate(tensor.pieces):
        assert piece.file == f"pytorch_model_fsdp_local/0_rank{rank}.safetensors"
        data = np.fromfile(tmp_path / piece.file, "<f4", count=6, offset=piece.offset)
        assert (data == rank).all()
    optimizer = read_stored_optimizer(tmp_path)
    assert optimizer is not None
    assert optimizer.state["w"]["exp_avg"].shape == (4, 3)
    assert optimizer.state["w"]["rounds"] == 1, "the value of the highest rank is used"
    assert optimizer.groups == [{"params": ["w"], "lr": 0.1}]


def test_all_missing_ranks_are_reported(tmp_path: Path) -> None:
    local_part(tmp_path / "pytorch_model_fsdp_local", 1, num_ranks=3)
    with pytest.raises(CheckpointError, match=r"(?s)0_rank0\.safetensors: .*E457.*0_rank2\.safetensors: .*E457"):
        read_stored_model(tmp_path)


@pytest.mark.parametrize(
    ("changed", "detail", "code"),
    [
        ({"world_size": 5}, "2 and 5", "FSDP-E459"),
        ({"piece": {"shape": [9, 3]}}, r"0_rank1.*'w'", "FSDP-E459"),
        ({"piece": {"offsets": [3, 0]}}, r"'p0' is Box\(offsets=\(3, 0\).* of \(4, 3\)", "FSDP-E453"),
        ({"piece": {"offsets": [0, 0]}}, "6 elements of 1 tensor .*: w", "FSDP-E458"),
        ({"piece": {"name": 3}}, "name 3", "FSDP-E453"),
        ({"pieces": {}}, "pieces", "FSDP-E453"),
        ({"world_size": 1 << 40}, "world_size 1099511627776", "FSDP-E453"),
        ({"aliases": {"tied": "nothing"}}, "'tied' is tied to 'nothing'", "FSDP-E459"),
    ],
)
def test_contradicting_files_are_refused(tmp_path: Path, changed: dict[str, Any], detail: str, code: str) -> None:
    folder = tmp_path / "pytorch_model_fsdp_local"
    local_part(folder, 0)
    local_part(folder, 1, **changed)
    with pytest.raises(CheckpointError, match=f"{detail}.*{code}"):
        read_stored_model(tmp_path)


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    for rank in range(2):
        local_part(tmp_path / "pytorch_model_fsdp_local", rank, piece={"comment": 1}, comment="a later version")
    assert list(read_stored_model(tmp_path).tensors) == ["w", "tied"]


def test_overlapping_boxes_are_replicas(tmp_path: Path) -> None:
    for rank in range(3):
        local_part(tmp_path / "pytorch_model_fsdp_local", rank, 3, {"shape": [4, 3], "offsets": [2 * (rank % 2), 0]})
    assert [piece.box.offsets for piece in read_stored_model(tmp_path).tensors["w"].pieces] == [(0, 0), (2, 0)]
