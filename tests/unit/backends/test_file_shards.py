"""Mapped shards have the values of the file, stay independent of it, and say when it was changed too early."""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import safe_open, save_file

from hf_fsdp_plugin.backends import file_shards, memory_maps
from hf_fsdp_plugin.backends.bits import sum_bits
from hf_fsdp_plugin.backends.file_shards import FileShards
from hf_fsdp_plugin.backends.file_views import file_views
from hf_fsdp_plugin.backends.memory_maps import MemoryMaps
from hf_fsdp_plugin.problems import CheckpointError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shards are mapped on Linux only")
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.float8_e4m3fn)
ROWS = 300


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Map shards of any size, and read them in several pieces."""
    monkeypatch.setattr(file_shards, "MIN_BYTES", 1)
    monkeypatch.setattr(file_shards, "_PIECE", 1 << 13)


@pytest.fixture
def weights(tmp_path: Path) -> Callable[[torch.dtype], torch.Tensor]:
    """Return a view of a file with a tensor of a dtype, which begins within a page."""

    def make(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        values = torch.randn(ROWS, 31).mul(50).to(dtype)
        save_file({"a": torch.zeros(3), "b": values}, tmp_path / "weights.safetensors")
        with safe_open(tmp_path / "weights.safetensors", "pt") as file:
            return file.get_tensor("b")

    return make


def map_part(shards: FileShards, whole: torch.Tensor, start: int = 0, stop: int = ROWS) -> torch.Tensor:
    (view,) = file_views([whole], MemoryMaps.read(private_bytes=True))
    assert view is not None
    part = whole[start:stop]
    mapped = shards.map(view, part.data_ptr() - whole.data_ptr(), part)
    assert mapped is not None and mapped.data_ptr() != part.data_ptr()
    return mapped


def bits_of(tensor: torch.Tensor) -> int:
    bits = sum_bits([tensor])
    assert bits is not None
    return int(bits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_have_the_values_of_the_file(weights, dtype: torch.dtype):
    whole, shards = weights(dtype), FileShards()
    parts = [map_part(shards, whole, 0, 101), map_part(shards, whole, 101, 103), map_part(shards, whole, 103)]
    shards.start()
    shards.wait()
    assert torch.equal(torch.cat([part.view(torch.uint8) for part in parts]), whole.view(torch.uint8))
    assert (shards.bit_sum - bits_of(whole)) % (1 << 64) == 0  # sums of 64-bit integers overflow
    # No storage is larger than its shard: FSDP2 copies parameters that keep more memory than they need.
    assert [part.untyped_storage().nbytes() for part in parts] == [part.nbytes for part in parts]


def test_read_shards_do_not_follow_the_file(weights, tmp_path: Path):
    whole, shards = weights(), FileShards()
    expected, part = whole.clone(), map_part(shards, whole)
    shards.start()
    shards.wait()
    path = tmp_path / "weights.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(part, expected) and not torch.equal(whole, expected)
    path.write_bytes(b"")
    assert torch.equal(part, expected)


def test_values_that_were_written_before_stay(weights):
    whole, shards = weights(), FileShards()
    expected, part = whole.clone(), map_part(shards, whole)
    part[7] = 3.0
    shards.start()
    shards.wait()
    assert (part[7] == 3.0).all() and torch.equal(part[8:], expected[8:]) and torch.equal(part[:7], expected[:7])
    assert shards.bit_sum == bits_of(expected)  # of the file, so that the change is noticed
    assert torch.equal(whole, expected)


def test_a_change_while_reading_is_an_error(weights, tmp_path: Path):
    whole, shards = weights(), FileShards()
    map_part(shards, whole)
    with (tmp_path / "weights.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"new!")
    shards.start()
    with pytest.raises(CheckpointError, match="was changed while") as raised:
        shards.wait()
    assert [problem.code for problem in raised.value.problems] == ["FSDP-E326"]


def test_a_truncated_file_is_an_error(weights, tmp_path: Path):
    whole, shards = weights(), FileShards()
    part = map_part(shards, whole)
    os.truncate(tmp_path / "weights.safetensors", 4096)
    shards.start()
    with pytest.raises(CheckpointError, match="become shorter") as raised:
        shards.wait()
    assert [problem.code for problem in raised.value.problems] == ["FSDP-E327"]
    del part


def test_a_replaced_file_is_not_mapped(weights, tmp_path: Path):
    whole, shards = weights(), FileShards()
    (view,) = file_views([whole], MemoryMaps.read(private_bytes=True))
    assert view is not None
    save_file({"b": torch.zeros(ROWS, 31)}, tmp_path / "other")
    os.replace(tmp_path / "other", tmp_path / "weights.safetensors")
    assert shards.map(view, 0, whole) is None


def test_a_freed_shard_frees_its_memory(weights):
    whole, shards = weights(), FileShards()
    part = map_part(shards, whole)
    address = part.data_ptr()
    assert any(region.start <= address < region.end for region in MemoryMaps.read()._regions)
    del part
    assert not any(region.start <= address < region.end for region in MemoryMaps.read()._regions)
    shards.start()
    shards.wait()
    assert shards.bit_sum == bits_of(whole)


def test_no_file_stays_open(weights):
    before = len(os.listdir("/proc/self/fd"))
    whole, shards = weights(), FileShards()
    parts = [map_part(shards, whole, row, row + 1) for row in range(ROWS)]
    assert len(os.listdir("/proc/self/fd")) == before + 1
    shards.start()
    shards.wait()
    assert len(os.listdir("/proc/self/fd")) == before and len(parts) == ROWS


def test_small_and_strided_parts_are_copied(weights, monkeypatch: pytest.MonkeyPatch):
    whole, shards = weights(), FileShards()
    (view,) = file_views([whole], MemoryMaps.read(private_bytes=True))
    assert view is not None
    assert shards.map(view, 0, whole[:, :3]) is None
    monkeypatch.setattr(file_shards, "MIN_BYTES", whole.nbytes + 1)
    assert shards.map(view, 0, whole) is None


def test_a_forked_process_copies_itself(weights):
    whole, shards = weights(), FileShards()
    part = map_part(shards, whole)
    shards._thread = threading.Thread(target=int)  # as after a fork: it is known, and does not run
    shards._thread.start()
    shards.wait()
    assert shards.bit_sum == bits_of(whole) and torch.equal(part, whole)


def test_pages_without_a_page_map_count_as_changed(weights, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_maps, "PAGE_MAP", "/nowhere")
    whole, shards = weights(), FileShards()
    part = map_part(shards, whole)
    part[3] = 1.0
    shards.start()
    shards.wait()
    assert (part[3] == 1.0).all() and torch.equal(part[4:], whole[4:])


def test_a_deep_copy_keeps_the_sum(weights):
    whole, shards = weights(), FileShards()
    part = map_part(shards, whole)
    shards.start()
    assert copy.deepcopy(shards).bit_sum == bits_of(part)
