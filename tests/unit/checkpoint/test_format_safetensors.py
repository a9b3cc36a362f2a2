"""Hugging Face folders and local checkpoints: what is found, and what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_fsdp_plugin.checkpoint.formats.safetensors_files import LOCAL_KEY, read_header
from safetensors.numpy import save_file

from hf_fsdp_plugin.checkpoint.formats.boxes import Box
from hf_fsdp_plugin.checkpoint.formats.table import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.problems import CheckpointError


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def shard(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def local_part(folder: Path, rank: int, num_ranks: int = 2, piece: dict[str, Any] | None = None, **said: Any) -> None:
    """Rows ``2 * rank`` and ``2 * rank + 1``, filled with the rank, of a tensor of ``2 * num_ranks`` rows."""
    folder.mkdir(exist_ok=True)
    pieces = {"p0": {"name": "_orig_mod.w", "shape": [2 * num_ranks, 3], "offsets": [2 * rank, 0], **(piece or {})}}
    said = {"rank": rank, "world_size": num_ranks, "pieces": pieces, "aliases": {"tied": "w"}, **said}
    rows = np.full((2, 3), rank, np.float32)
    save_file({"p0": rows}, folder / f"0_rank{rank}.safetensors", {LOCAL_KEY: json.dumps(said)})


def test_a_single_file_and_shards_are_found(tmp_path: Path) -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(3, dtype=np.int64)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    save_file({"_orig_mod.a": a, "b": b}, tmp_path / "one" / "model.safetensors")
    save_file({"_orig_mod.a": a}, tmp_path / "two" / "x.safetensors")
    save_file({"b": b, "unlisted": b}, tmp_path / "two" / "y.safetensors")
    shard(tmp_path / "two", {"_orig_mod.a": "x.safetensors", "b": "y.safetensors"})
    for folder in (tmp_path / "one", tmp_path / "two"):
        index = read_stored_model(folder)
        assert index.format == "full"
        assert index.tensors.keys() == {"a", "b"}
        for name, expected in (("a", a), ("b", b)):
            tensor = index.tensors[name]
            (piece,) = tensor.pieces
            data = (folder / piece.file).read_bytes()[piece.offset :][: expected.nbytes]
            assert (data, tensor.shape, tensor.dtype) == (expected.tobytes(), expected.shape, str(expected.dtype))
        assert read_stored_optimizer(folder) is None


def test_a_further_model_of_the_run_has_its_number_in_the_name(tmp_path: Path) -> None:
    save_file({"a": np.zeros(2)}, tmp_path / "model.safetensors")
    save_file({"b": np.zeros(2)}, tmp_path / "model_1.safetensors")
    assert list(read_stored_model(tmp_path, 1).tensors) == ["b"]


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/hostname", "link.safetensors"])
def test_an_index_names_no_file_outside_its_folder(tmp_path: Path, file: str) -> None:
    save_file({"a": np.zeros(2)}, tmp_path / "x.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link.safetensors").symlink_to("../x.safetensors")
    shard(folder, {"a": file})
    with pytest.raises(CheckpointError, match=r"index\.json: it names the file .*outside its folder"):
        read_stored_model(folder)


def test_a_snapshot_of_the_cache_links_to_its_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    save_file({"a": np.zeros(2)}, tmp_path / "blobs" / "0123")
    (snapshot / "x.safetensors").symlink_to("../../blobs/0123")
    shard(snapshot, {"a": "x.safetensors"})
    assert list(read_stored_model(snapshot).tensors) == ["a"]


def test_all_that_an_index_promises_in_vain_is_named_at_once(tmp_path: Path) -> None:
    shard(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"})
    with pytest.raises(CheckpointError) as raised:
        read_stored_model(tmp_path)
    assert len(raised.value.problems) == 2
    save_file({"c": np.zeros(2)}, tmp_path / "x.safetensors")
    save_file({"b": np.zeros(2)}, tmp_path / "y.safetensors")
    with pytest.raises(CheckpointError, match=r"it places 1 tensors in x\.safetensors, which lacks them; .* 'a'"):
        read_stored_model(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="not an index of weights"):
        read_stored_model(tmp_path)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, 12, "tensors overlap"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 12, 20)}, 20, "byte 8 is the next"),
        ({"a": entry("F32", [2], 0, 12)}, 12, "another size"),
        ({"a": entry("F32", [2], 0, 8)}, 4, "bytes long, where its header needs"),
        ({"a": entry("F32", [2], 0, 8)}, 9, "bytes long, where its header needs"),
        ({"a": entry("F32", [1 << 62, 1 << 62], 0, 8)}, 8, "another size"),
        ({"a": entry("F33", [2], 0, 8)}, 8, "unknown element type 'F33'"),
        ({"a": entry("F32", [-2], 0, 8)}, 8, r"header is damaged .*shape \(-2,\)"),
        ({"a": entry("F32", [2], 8, 0)}, 8, "data_offsets"),
        ({"a": {"dtype": "F32"}}, 0, "header is damaged"),
        ([1, 2], 0, "header is damaged"),
        (b"{nonsense", 0, "header is damaged"),
        (b"[" * 100_000, 0, "header is damaged"),
        (b'{"a": {}, "a": {}}', 0, "a key stands in it twice"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: Any, data: int, message: str) -> None:
    path = write(tmp_path / "model.safetensors", header, bytes(data))
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


@pytest.mark.parametrize("length", [0, 1 << 20, (1 << 63) + 5])
def test_a_header_longer_than_the_file_is_not_read(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "model.safetensors", {}, b"", length)
    with pytest.raises(CheckpointError, match=rf"with a header of {length} bytes: truncated, or no safetensors"):
        read_header(path)
    path.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="3 bytes long"):
        read_header(path)


def test_a_local_checkpoint_is_the_boxes_of_all_ranks(tmp_path: Path) -> None:
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
    assert optimizer.state["w"]["rounds"] in (0, 1)
    assert optimizer.groups == [{"params": ["w"], "lr": 0.1}]


def test_every_missing_ranks_file_is_named(tmp_path: Path) -> None:
    local_part(tmp_path / "pytorch_model_fsdp_local", 1, num_ranks=3)
    with pytest.raises(CheckpointError, match=r"(?s)0_rank0\.safetensors: missing.*0_rank2\.safetensors: missing"):
        read_stored_model(tmp_path)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"world_size": 5}, r"files are of runs of \[2, 5\] ranks"),
        ({"piece": {"shape": [9, 3]}}, "in another rank's file"),
        ({"piece": {"offsets": [3, 0]}}, r"'p0' is Box\(offsets=\(3, 0\).* of \(4, 3\)"),
        ({"piece": {"offsets": [0, 0]}}, "6 elements of 1 tensors are in none of its files"),
        ({"piece": {"name": 3}}, "not a rank's file"),
        ({"pieces": {}}, "its pieces are not its tensors"),
        ({"world_size": 1 << 40}, "world_size 1099511627776"),
        ({"aliases": {"tied": "nothing"}}, "'tied' is tied to 'nothing', which no rank's file holds"),
    ],
)
def test_ranks_files_that_contradict_each_other_are_refused(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    folder = tmp_path / "pytorch_model_fsdp_local"
    local_part(folder, 0)
    local_part(folder, 1, **said)
    with pytest.raises(CheckpointError, match=message):
        read_stored_model(tmp_path)
