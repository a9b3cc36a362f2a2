"""The layout of safetensors files, compared with the safetensors library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from hf_fsdp_plugin.checkpoint.formats.safetensors import (
    SAFETENSORS_NAMES,
    SafetensorsFile,
    index_text,
    num_bytes,
    plan_files,
)
from hf_fsdp_plugin.checkpoint.formats.stored_tensors import SIZES
from hf_fsdp_plugin.problems import CheckpointError

GB = 10**9


def write(folder: Path, file: SafetensorsFile) -> Path:
    """Write the file with tensors of zeros."""
    path = folder / file.name
    path.write_bytes(file.header + bytes(file.size - len(file.header)))
    return path


def test_safetensors_reads_every_dtype_and_shape(tmp_path: Path) -> None:
    names, shapes = reversed(SAFETENSORS_NAMES), [(3, 5), (), (0, 4), (7,)]
    tensors = [(f"{dtype}.{rank}", dtype, shape) for dtype in names for rank, shape in enumerate(shapes)]
    (file,) = plan_files(tensors, GB)
    with safe_open(write(tmp_path, file), "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert sorted(opened.keys()) == sorted(name for name, _, _ in tensors)
        for name, dtype, shape in tensors:
            tensor = opened.get_tensor(name)
            assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{dtype}", shape)


def test_data_and_tensors_are_aligned() -> None:
    tensors = [("a", "uint8", (3,)), ("b", "float64", (1,)), ("c", "bfloat16", (5,)), ("d", "float32", (3,))]
    (file,) = plan_files(tensors, GB)
    assert len(file.header) % 4096 == 0
    assert list(file.offsets) == ["b", "d", "c", "a"]
    assert all(file.offsets[name] % SIZES[dtype] == 0 for name, dtype, _ in tensors)
    assert file.size == len(file.header) + 8 + 12 + 10 + 3


def test_offsets_match_the_header() -> None:
    (file,) = plan_files([("a", "float32", (2, 2)), ("ä", "float32", (3,))], GB)
    header = json.loads(file.header[8:])
    assert int.from_bytes(file.header[:8], "little") == len(file.header) - 8
    assert {name: len(file.header) + header[name]["data_offsets"][0] for name in file.offsets} == file.offsets


def test_large_tensor_has_its_own_shard() -> None:
    tensors = [("a", "float32", (10,)), ("big", "float32", (100,)), ("b", "float32", (10,)), ("c", "float32", (6,))]
    files = plan_files(tensors, 80)
    assert [list(file.offsets) for file in files] == [["a", "b"], ["c"], ["big"]]
    assert [file.name for file in files] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    index = json.loads(index_text(files) or "")
    assert index["metadata"]["total_size"] == sum(num_bytes(dtype, shape) for _, dtype, shape in tensors)
    assert index["weight_map"] == {"a": files[0].name, "b": files[0].name, "c": files[1].name, "big": files[2].name}


@pytest.mark.parametrize("tensors", [[], [("a", "float32", (20,))]])
def test_single_file_has_no_index(tensors: list[tuple[str, str, tuple[int, ...]]]) -> None:
    files = plan_files(tensors, 80, stem="adapter_model")
    assert [file.name for file in files] == ["adapter_model.safetensors"]
    assert index_text(files) is None


def test_all_invalid_tensors_are_reported() -> None:
    tensors = [("a", "quint8", (1,)), ("b", "int8", (1,)), ("c", "quint4x2", (1,))]
    with pytest.raises(CheckpointError, match=r"quint8.*FSDP-E466") as caught:
        plan_files(tensors, GB)
    found = [(problem.code, problem.message.split("'")[1]) for problem in caught.value.problems]
    assert found == [("FSDP-E466", "a"), ("FSDP-E466", "c")]


def test_name_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"the name 'a\\ud800' is not valid Unicode.*FSDP-E466"):
        plan_files([("a\ud800", "float32", (1,))], 100)
