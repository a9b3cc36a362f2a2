"""The file of a rank's record: in memory if it has space, and found by its path in any case."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_fsdp_plugin.hangs import mapped_file
from hf_fsdp_plugin.hangs.calls import CallRecord, read_header
from hf_fsdp_plugin.hangs.mapped_file import make_mapped_file, remove_file
from hf_fsdp_plugin.hangs.watch_files import RankFiles, remove_files


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of ``/dev/shm``."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(mapped_file, "_MEMORY", folder)
    monkeypatch.setattr(Path, "is_mount", lambda folder: True)
    return folder


def test_record_is_in_memory_and_read_by_its_path(tmp_path: Path, memory: Path) -> None:
    files, record = RankFiles(tmp_path / "rank_0"), CallRecord()
    record.open(files.calls, in_memory=True)
    [target] = memory.iterdir()
    assert files.calls.readlink() == target and target.stat().st_mode & 0o777 == 0o600
    assert (header := read_header(files.calls)) is not None and header.count == 0
    record.open(files.calls, in_memory=True)  # again: the file before is gone
    assert len(list(memory.iterdir())) == 1
    remove_files(files.stem)
    assert not files.calls.is_symlink() and list(memory.iterdir()) == []
    record.open(files.calls)
    assert not files.calls.is_symlink() and list(memory.iterdir()) == []
    record.close()


@pytest.mark.skipif(not Path("/dev/shm").is_mount(), reason="/dev/shm is no mount")
def test_file_is_in_shared_memory_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    target = make_mapped_file(path, 100)
    assert target.parent == Path("/dev/shm") and path.read_bytes() == bytes(100)
    remove_file(path)
    assert not target.exists()


@pytest.mark.parametrize("reason", ["no mount", "no space", "no permission"])
def test_file_is_at_its_path_without_memory(
    reason: str, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, path = mapped_file._make_file, tmp_path / "calls"

    def make_file(target: Path, size: int) -> None:
        if target.parent == memory:
            if reason == "no space":
                target.touch()
            raise OSError(reason)
        make(target, size)

    monkeypatch.setattr(mapped_file, "_make_file", make_file)
    if reason == "no mount":
        monkeypatch.setattr(Path, "is_mount", lambda folder: False)
    assert make_mapped_file(path, 100) == path and not path.is_symlink() and path.stat().st_size == 100
    assert list(memory.iterdir()) == []
