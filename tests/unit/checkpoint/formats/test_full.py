"""Hugging Face folders: single files, shards with an index, and invalid indices."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.problems import CheckpointError
from tests.support.assembled import assembled


def shard(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_single_file_and_shards_are_read(tmp_path: Path) -> None:
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
            assert (tensor.shape, tensor.dtype) == (expected.shape, str(expected.dtype))
            assert (assembled(folder, tensor) == expected).all()
        assert read_stored_optimizer(folder) is None


def test_second_model_has_its_number_in_the_file_name(tmp_path: Path) -> None:
    save_file({"a": np.zeros(2)}, tmp_path / "model.safetensors")
    save_file({"b": np.zeros(2)}, tmp_path / "model_1.safetensors")
    assert list(read_stored_model(tmp_path, 1).tensors) == ["b"]


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/hostname"])
def test_index_with_file_outside_the_folder_is_refused(tmp_path: Path, file: str) -> None:
    save_file({"a": np.zeros(2)}, tmp_path / "x.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    shard(folder, {"a": file})
    with pytest.raises(CheckpointError, match=r"index\.json: .*FSDP-E456"):
        read_stored_model(folder)


def test_links_of_the_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    save_file({"a": np.zeros(2)}, tmp_path / "blobs" / "0123")
    (snapshot / "x.safetensors").symlink_to("../../blobs/0123")
    shard(snapshot, {"a": "x.safetensors"})
    assert list(read_stored_model(snapshot).tensors) == ["a"]


def test_all_missing_shards_and_tensors_are_reported(tmp_path: Path) -> None:
    shard(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"})
    with pytest.raises(CheckpointError) as raised:
        read_stored_model(tmp_path)
    assert [problem.code for problem in raised.value.problems] == ["FSDP-E457"] * 2
    save_file({"c": np.zeros(2)}, tmp_path / "x.safetensors")
    save_file({"b": np.zeros(2)}, tmp_path / "y.safetensors")
    with pytest.raises(CheckpointError, match=r"index\.json: .* x\.safetensors .*: a\..*FSDP-E459"):
        read_stored_model(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_invalid_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: .*FSDP-E453"):
        read_stored_model(tmp_path)


def test_index_of_many_missing_files_is_refused_quickly(tmp_path: Path) -> None:
    shard(tmp_path, {f"w{number}": f"part{number}.safetensors" for number in range(20_000)})
    begin = time.process_time()
    with pytest.raises(CheckpointError, match="FSDP-E457"):
        read_stored_model(tmp_path)
    assert time.process_time() - begin < 1  # 3 s if each path is resolved
