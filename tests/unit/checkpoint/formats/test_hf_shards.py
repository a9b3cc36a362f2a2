"""Folders of ``save_pretrained(distributed_checkpoint=True)`` and of torch's writer: boxes in safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.tools.inspect.summary import summarize
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support import saved
from tests.support.assembled import assembled

WHOLE = {"a": np.arange(12, dtype="f4").reshape(4, 3), "b": np.arange(5, dtype="i8"), "c": np.float32(7).reshape(())}
BOXES: dict[int, dict[str, Any]] = {
    1: {"a": ((0, 0), (3, 2)), "b": ((0,), (3,)), "c": ((), ())},
    2: {"a": ((0, 2), (3, 1)), "b": ((3,), (2,))},
    4: {"a": ((3, 0), (1, 3))},  # a rank without elements has no file
}


def write(folder: Path, rank: int, offsets: Any = None) -> Path:
    """Write the file of one rank, as torch does."""
    path = folder / f"shard-{rank:05d}-model-00001-of-00001.safetensors"
    parts = {
        name: np.ascontiguousarray(
            WHOLE[name][tuple(slice(at, at + size) for at, size in zip(starts, sizes, strict=True))]
        ).reshape(sizes)
        for name, (starts, sizes) in BOXES[rank].items()
    }
    places = {name: {"saved_offsets": list(starts)} for name, (starts, _) in BOXES[rank].items()}
    text = json.dumps(places) if offsets is None else offsets
    save_file(parts, path, {"DCP_SHARDING_INFO": text, "DCP_VERSION": "1.0", "format": "pt"})
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for rank in BOXES:
        write(tmp_path, rank)
    return tmp_path


def test_boxes_of_all_ranks_are_the_tensors(folder: Path) -> None:
    model = read_stored_model(folder)
    assert model.format == "hf_shards" and model.tensors.keys() == WHOLE.keys()
    for name, expected in WHOLE.items():
        assert (assembled(folder, model.tensors[name]) == expected).all()
        assert model.tensors[name].shape == expected.shape
    assert read_stored_optimizer(folder) is None
    assert summarize(folder).incomplete is None and saved.errors(verify(folder)) == []


def test_missing_file_is_refused(folder: Path) -> None:
    next(folder.glob("shard-00002*")).unlink()
    with pytest.raises(CheckpointError, match=r"3 elements of 1 tensor are in none of the files: a\..*FSDP-E458"):
        read_stored_model(folder)


@pytest.mark.parametrize(
    "offsets",
    ["", "[]", "{}", "null", '{"a": {"saved_offsets": [0]}, "b": {"saved_offsets": [3]}}',
     '{"a": {"saved_offsets": [-1, 2]}, "b": {"saved_offsets": [3]}}',
     '{"a": {"saved_offsets": ["0", 2]}, "b": {"saved_offsets": [3]}}', "[" * 100_000],
    ids=str,
)  # fmt: skip
def test_invalid_offsets_are_refused(folder: Path, offsets: str) -> None:
    path = write(folder, 2, offsets)
    with pytest.raises(CheckpointError, match=rf"{path.name}: has no valid DCP_SHARDING_INFO.*FSDP-E453"):
        read_stored_model(folder)


def test_other_dtype_of_a_tensor_is_refused(folder: Path) -> None:
    info = {"DCP_SHARDING_INFO": json.dumps({"b": {"saved_offsets": [3]}})}
    save_file({"b": np.zeros(2, "f4")}, folder / "shard-00002-model-00001-of-00001.safetensors", info)
    with pytest.raises(CheckpointError, match="FSDP-E459"):
        read_stored_model(folder)


def test_shards_of_an_interrupted_consolidation_are_read(folder: Path) -> None:
    (folder / "sharded").mkdir()
    for path in folder.glob("shard-*"):
        path.rename(folder / "sharded" / path.name)
    model = read_stored_model(folder)
    assert model.format == "hf_shards" and (assembled(folder, model.tensors["a"]) == WHOLE["a"]).all()
    assert model.files == tuple(f"sharded/shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in BOXES)


@pytest.mark.parametrize("rows", [4, 2], ids=["whole", "overwritten"])
def test_file_that_ranks_have_overwritten_is_refused(tmp_path: Path, rows: int) -> None:
    """Without ``save_distributed``, all ranks write to one file. The index has the bytes of all of their parts."""
    info = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [0, 0]}}), "DCP_VERSION": "1.0"}
    save_file({"a": WHOLE["a"][:rows]}, tmp_path / "model-00001-of-00001.safetensors", info)
    index = {"metadata": {"total_size": WHOLE["a"].nbytes}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    if rows == len(WHOLE["a"]):
        assert read_stored_model(tmp_path).format == "full"
        return
    with pytest.raises(CheckpointError, match=r"several ranks wrote to the same files.*FSDP-E458"):
        read_stored_model(tmp_path)
