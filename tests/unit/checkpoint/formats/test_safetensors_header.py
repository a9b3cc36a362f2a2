"""The headers of safetensors files: damaged and hostile ones are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from hf_fsdp_plugin.checkpoint.formats.safetensors import read_entries
from hf_fsdp_plugin.problems import CheckpointError


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "data", "detail"),
    [
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, 12, "next free byte is 8"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 12, 20)}, 20, "next free byte is 8"),
        ({"a": entry("F32", [2], 0, 12)}, 12, "wrong size"),
        ({"a": entry("F32", [2], 0, 8)}, 4, "requires"),
        ({"a": entry("F32", [2], 0, 8)}, 9, "requires"),
        ({"a": entry("F32", [1 << 62, 1 << 62], 0, 8)}, 8, "wrong size"),
        ({"a": entry("F33", [2], 0, 8)}, 8, "unknown element type 'F33'"),
        ({"a": entry("F32", [-2], 0, 8)}, 8, r"shape \(-2,\)"),
        ({"a": entry("F32", [2], 8, 0)}, 8, "data_offsets"),
        ({"a": {"dtype": "F32"}}, 0, "header"),
        ([1, 2], 0, "header"),
        (b"{nonsense", 0, "header"),
        (b"[" * 100_000, 0, "header"),
        (b'{"a": {}, "a": {}}', 0, "duplicate key"),
        (b'{"__metadata__": {"format": "pt", "format": "np"}}', 0, "duplicate key"),
        (b'{"__metadata__": ["", "", "", ""], "a": {}, "a": {}}', 0, "duplicate key"),
        (b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], "dt\\u0079pe": "F32"}}', 0, "duplicate key"),
    ],
)
def test_invalid_header_is_refused(tmp_path: Path, header: Any, data: int, detail: str) -> None:
    path = write(tmp_path / "model.safetensors", header, bytes(data))
    with pytest.raises(CheckpointError, match=f"{detail}.*FSDP-E453"):
        read_entries(path)


@pytest.mark.parametrize("length", [0, 1 << 20, (1 << 63) + 5])
def test_header_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "model.safetensors", {}, b"", length)
    with pytest.raises(CheckpointError, match=rf"a header of {length} bytes.*FSDP-E453"):
        read_entries(path)
    path.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match=r"3 bytes.*FSDP-E453"):
        read_entries(path)


def test_pointer_of_git_lfs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123456\n")
    with pytest.raises(CheckpointError, match=r"size is 123456.*FSDP-E469"):
        read_entries(path)
