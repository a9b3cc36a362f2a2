"""Files of any size are written correctly, with and without direct I/O."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_fsdp_plugin.checkpoint import io
from hf_fsdp_plugin.checkpoint.merging import copying as merge_write
from hf_fsdp_plugin.checkpoint.merging.copying import write_file

BUFFER = 8192


def write(path: Path, data: bytes) -> None:
    def fill(memory: memoryview, start: int) -> None:
        memory[:] = data[start : start + len(memory)]

    write_file(path, len(data), fill)


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_write, "BUFFER", BUFFER)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [0, 1, 4096, BUFFER - 1, BUFFER, BUFFER + 1, 5 * BUFFER + 4097])
def test_all_bytes_are_written(size: int, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not direct:
        monkeypatch.setattr(io, "DIRECT", 0)
    data = os.urandom(size)
    write(tmp_path / "f", data)
    assert (tmp_path / "f").read_bytes() == data


def test_existing_file_is_truncated(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(3 * BUFFER))
    write(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"new"


def test_refused_direct_writes_use_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems open a file for direct writes, and then refuse the writes."""
    import errno
    import fcntl

    pwrite = os.pwrite
    refused = []

    def refusing(descriptor: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    write(tmp_path / "f", bytes(BUFFER) + b"end")
    assert refused == [0]
    assert (tmp_path / "f").read_bytes() == bytes(BUFFER) + b"end"


def test_disk_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "f", bytes(4 * BUFFER))
