"""Damaged files of a Hugging Face model are found by their index and headers, before weights are read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.checkpoint.checking.against_model import (
    check_model_index,
    raise_absent_tensors,
    raise_shape_mismatches,
    read_model_headers,
)
from hf_fsdp_plugin.problems import CheckpointError, Problem

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2200119864\n"
SHARDS = ("model-1.safetensors", "model-2.safetensors")


def safetensors(*names: str, dtype: str = "F32", size: int = 16) -> bytes:
    header = {
        name: {"dtype": dtype, "shape": [2, 2], "data_offsets": [index * size, (index + 1) * size]}
        for index, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size * len(names))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in two files."""
    for number, shard in enumerate(SHARDS):
        (tmp_path / shard).write_bytes(safetensors(f"a{number}", f"b{number}"))
    weight_map = {f"{name}{number}": shard for number, shard in enumerate(SHARDS) for name in "ab"}
    write_index(tmp_path, {"metadata": {}, "weight_map": weight_map})
    return tmp_path


def write_index(folder: Path, content: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(content if isinstance(content, str) else json.dumps(content))


def check(folder: Path) -> None:
    check_model_index(folder / "model.safetensors.index.json", is_local=True)
    read_model_headers([str(folder / shard) for shard in SHARDS])


def found(folder: Path) -> Problem:
    with pytest.raises(CheckpointError) as caught:
        check(folder)
    (problem,) = caught.value.problems
    assert problem.fix
    return problem


def test_whole_model_is_accepted(folder: Path) -> None:
    check_model_index(folder / "model.safetensors.index.json", is_local=True)
    tensors = read_model_headers([str(folder / shard) for shard in SHARDS])
    assert {name: (Path(each.file).name, each.shape) for name, each in tensors.items()} == {
        f"{name}{number}": (shard, (2, 2)) for number, shard in enumerate(SHARDS) for name in "ab"
    }


@pytest.mark.parametrize("count", [1, 16, 17, 100])
def test_truncated_file_is_refused_with_its_size(folder: Path, count: int) -> None:
    path = folder / SHARDS[1]
    whole = path.read_bytes()
    path.write_bytes(whole[:-count])
    problem = found(folder)
    assert problem.code == "FSDP-E453" and problem.origin is not None and problem.origin.source == str(path)
    assert str(len(whole) - count) in problem.message


@pytest.mark.parametrize(
    "content",
    [b"", b"1234567", struct.pack("<Q", 1 << 40) + b"{}", struct.pack("<Q", 4) + b"{no}", safetensors("a") + b"0"],
    ids=["empty", "short", "long header", "no JSON", "longer than its header"],
)
def test_broken_header_is_refused(folder: Path, content: bytes) -> None:
    (folder / SHARDS[0]).write_bytes(content)
    problem = found(folder)
    assert problem.code == "FSDP-E453" and problem.origin is not None and problem.origin.source.endswith(SHARDS[0])


@pytest.mark.parametrize("file", [SHARDS[0], "model.safetensors.index.json"])
def test_git_lfs_pointer_is_named_with_its_remedy(folder: Path, file: str) -> None:
    (folder / file).write_bytes(POINTER)
    problem = found(folder)
    assert problem.code == "FSDP-E469" and "2200119864" in problem.message and "git lfs pull" in problem.fix


@pytest.mark.parametrize(("content", "code"), [(POINTER, "FSDP-E469"), (b"", "FSDP-E453")])
def test_bin_file_is_checked_for_pointers_only(tmp_path: Path, content: bytes, code: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=code):
        read_model_headers([str(path)])
    path.write_bytes(b"PK any other content")
    assert read_model_headers([str(path)]) == {}


@pytest.mark.parametrize(
    "content",
    ["{", "", "[]", '{"metadata": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'],
    ids=["cut", "empty", "list", "no map", "no mapping", "no name"],
)
def test_broken_index_is_refused(folder: Path, content: str) -> None:
    write_index(folder, content)
    problem = found(folder)
    assert problem.code == "FSDP-E453" and problem.origin is not None and problem.origin.source.endswith("index.json")
    assert "Expected" in problem.message


@pytest.mark.parametrize("name", ["../model.safetensors", "/tmp/model.safetensors", "a/../../b", "a\0b"])
def test_index_with_file_outside_the_folder_is_refused(folder: Path, name: str) -> None:
    write_index(folder, {"metadata": {}, "weight_map": {"a": name}})
    assert found(folder).code == "FSDP-E456"


def test_missing_shard_is_named_for_local_folders_only(folder: Path) -> None:
    (folder / SHARDS[1]).unlink()
    problem = found(folder)
    assert problem.code == "FSDP-E457" and SHARDS[1] in problem.message
    check_model_index(folder / "model.safetensors.index.json", is_local=False)


def test_links_to_files_elsewhere_are_followed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tmp_path_factory.mktemp("other") / "weights"
    (folder / SHARDS[1]).rename(target)
    (folder / SHARDS[1]).symlink_to(target)
    check(folder)


def test_unknown_dtype_is_accepted(folder: Path) -> None:
    (folder / SHARDS[0]).write_bytes(safetensors("a0", dtype="F4", size=2))
    assert read_model_headers([str(folder / SHARDS[0])])["a0"].shape == (2, 2)


def test_absent_tensors_and_shapes_name_file_and_values() -> None:
    raise_absent_tensors([], {}, [])
    raise_shape_mismatches([], "Model", "folder")
    with pytest.raises(CheckpointError, match=r"/m/x\.safetensors: .*: a\. .*FSDP-E459"):
        raise_absent_tensors(["a"], {"a": "x.safetensors"}, ["/m/x.safetensors"])
    with pytest.raises(CheckpointError, match=r"/m/x: .*a \(2×3 in the file, 2×4 in the model\).*FSDP-E479"):
        raise_shape_mismatches([("a", "/m/x", (2, 3), (2, 4))], "Model", "folder")
