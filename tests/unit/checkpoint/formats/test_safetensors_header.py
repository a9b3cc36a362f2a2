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
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, 12, "invalid offset"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 12, 20)}, 20, "invalid offset"),
        ({"a": entry("F32", [2], 0, 12)}, 12, "offset"),
        ({"a": entry("F32", [2], 0, 8)}, 4, "requires .* bytes.*not fully covered"),
        ({"a": entry("F32", [2], 0, 8)}, 9, "requires .* bytes.*not fully covered"),
        ({"a": entry("F32", [1 << 62, 1 << 62], 0, 8)}, 8, "overflow"),
        ({"a": entry("F33", [2], 0, 8)}, 8, "unknown variant `F33`"),
        ({"a": entry("F32", [-2], 0, 8)}, 8, "-2"),
        ({"a": entry("F32", [2], 8, 0)}, 8, "invalid offset"),
        ({"a": {"dtype": "F32"}}, 0, "header"),
        ([1, 2], 0, "header"),
        (b"{nonsense", 0, "header"),
        (b"[" * 100_000, 0, "header"),
        (b'{"a": {}, "a": {}}', 0, "invalid JSON"),
        (b'{"__metadata__": ["", "", "", ""], "a": {}, "a": {}}', 0, "invalid JSON"),
        (b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], "dt\\u0079pe": "F32"}}', 0, "duplicate field"),
    ],
)
def test_invalid_header_is_refused(tmp_path: Path, header: Any, data: int, detail: str) -> None:
    path = write(tmp_path / "model.safetensors", header, bytes(data))
    with pytest.raises(CheckpointError, match=f"{detail}.*FSDP-E453"):
        read_entries(path)


@pytest.mark.parametrize("length", [0, 1 << 20, (1 << 63) + 5])
def test_header_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "model.safetensors", {}, b"", length)
    with pytest.raises(CheckpointError, match=r"truncated.*FSDP-E453"):
        read_entries(path)
    path.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match=r"truncated.*FSDP-E453"):
        read_entries(path)


def test_pointer_of_git_lfs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123456\n")
    with pytest.raises(CheckpointError, match=r"size is 123456.*FSDP-E469"):
        read_entries(path)
