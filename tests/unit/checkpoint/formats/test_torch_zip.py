"""The zips of torch.save: records are found by their headers, and damaged zips are refused."""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from hf_fsdp_plugin.checkpoint.formats.torch_files import TensorZips, TorchZip
from hf_fsdp_plugin.problems import CheckpointError


def read(path: Path) -> TorchZip:
    with path.open("rb") as file:
        zipped = TorchZip(file, 0, path.stat().st_size, path)
        zipped.value()
        return zipped


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save(torch.arange(6.0), tmp_path / "a.bin")
    return tmp_path / "a.bin"


def test_equal_headers_are_parsed_once(tmp_path: Path) -> None:
    tensors = [torch.full((3, 4), 1.0), torch.full((3, 4), 2.0), torch.full((4, 3), 3.0), torch.tensor(4)]
    path = tmp_path / "row.distcp"
    starts = []
    with open(path, "wb") as file:
        for tensor in tensors:
            starts.append(file.tell())
            torch.save(tensor, file)
    ends = [*starts[1:], path.stat().st_size]
    zips = TensorZips()
    with path.open("rb") as file:
        found = [zips.read(file, start, end - start, path) for start, end in zip(starts, ends, strict=True)]
        assert [tensor.shape for tensor, _ in found] == [tuple(tensor.shape) for tensor in tensors]
        for (tensor, offset), expected in zip(found, tensors, strict=True):
            assert tensor.dtype == str(expected.dtype).removeprefix("torch.")
            raw = os.pread(file.fileno(), expected.nbytes, offset)
            assert raw == expected.numpy().tobytes()


def test_records_beyond_4_gib_are_found(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    size = (1 << 32) + 8
    with zipfile.ZipFile(path, "w") as made:
        # A hole: the file takes no space.
        for name in ("large/data/0", "large/data/1"):
            info = zipfile.ZipInfo(name)
            info.file_size = size
            with made.open(info, "w", force_zip64=True) as record:
                record.write(b"head")
                made.fp.seek(size - 4, os.SEEK_CUR)
                record._file_size = size
                record._compress_size = size
    with path.open("rb") as file:
        zipped = TorchZip(file, 0, path.stat().st_size, path)
        assert os.pread(file.fileno(), 4, zipped.offset("data/1")) == b"head"
        assert zipped.offset("data/1") > 1 << 32


def test_truncated_file_is_refused(saved: Path) -> None:
    data = saved.read_bytes()
    for length in (0, 1, 21, 100, len(data) // 2, len(data) - 1):
        saved.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"a\.bin: .*FSDP-E453"):
            read(saved)


def test_compressed_zip_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.bin", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("a/data.pkl", b"." * 1000)
    with pytest.raises(CheckpointError, match=r"record 'data\.pkl' .*FSDP-E453"):
        read(tmp_path / "a.bin")


def test_encrypted_entry_is_refused(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    data[data.index(b"PK\1\2") + 8] |= 1  # the flags in the directory
    saved.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"encrypted.*FSDP-E453"):
        read(saved)


def test_legacy_format_without_zip_is_refused(tmp_path: Path) -> None:
    torch.save(torch.zeros(2), tmp_path / "a.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="FSDP-E460"):
        read(tmp_path / "a.bin")


def test_big_endian_file_is_refused(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes().replace(b"little", b"bigbig"))
    with pytest.raises(CheckpointError, match="FSDP-E460"):
        read(saved)


@pytest.mark.parametrize("offset", [1, 1 << 20, 0xFFFFFFFE])
def test_entry_without_a_header_is_refused(saved: Path, offset: int) -> None:
    data = bytearray(saved.read_bytes())
    struct.pack_into("<L", data, data.index(b"PK\1\2") + 42, offset)
    saved.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"is damaged: .*FSDP-E453"):
        read(saved)


@pytest.mark.parametrize("offset", [1 << 62, (1 << 63) - 1, (1 << 64) - 1])
def test_offsets_that_no_file_has_are_refused(tmp_path: Path, offset: int) -> None:
    with zipfile.ZipFile(tmp_path / "a.bin", "w") as made:
        made.writestr("a/data.pkl", b".")
    data = bytearray((tmp_path / "a.bin").read_bytes())
    directory, end = data.index(b"PK\1\2"), len(data) - 22
    struct.pack_into("<L", data, directory + 42, 0xFFFFFFFF)
    wide = struct.pack("<2HQ", 1, 8, offset)
    struct.pack_into("<H", data, directory + 30, len(wide))
    struct.pack_into("<L", data, end + 12, end - directory + len(wide))
    data[end:end] = wide
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"is damaged: .*FSDP-E453"):
        read(tmp_path / "a.bin")
