"""Bytes are compared with the hashes of the manifest while they are read, block by block."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_fsdp_plugin.checkpoint.checking import hashes
from hf_fsdp_plugin.checkpoint.checking.hashes import VerifiedFiles, check_headers, files_of_checkpoint
from hf_fsdp_plugin.checkpoint.file_io import InputFiles
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model, read_stored_optimizer
from hf_fsdp_plugin.checkpoint.formats.manifest import FileRange, FileRecord, hash_bytes, hash_file
from hf_fsdp_plugin.problems import CheckpointError
from tests.support import damages, saved

BOUNDS = (0, 7, 8, 40, 41, 100, 164)
DATA = bytes(range(164))


@pytest.fixture(params=[None, 10], ids=["all_blocks_kept", "large_blocks_not_kept"])
def files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VerifiedFiles]:
    """The file ``a`` with blocks of different sizes, in the folder ``part`` of a checkpoint."""
    if request.param is not None:
        monkeypatch.setattr(hashes, "_STEP", request.param)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a").write_bytes(DATA)
    ranges = [
        FileRange(start=start, stop=stop, hash=hash_bytes(DATA[start:stop]), name=f"w{start}")
        for start, stop in itertools.pairwise(BOUNDS)
    ]
    record = FileRecord(path="part/a", size=len(DATA), ranges=ranges)
    with VerifiedFiles(tmp_path / "part", saved.manifest(files=(record,)), tmp_path) as files:
        yield files


def blocks_with(start: int, stop: int) -> list[tuple[int, int]]:
    return [(low, high) for low, high in itertools.pairwise(BOUNDS) if low < stop and start < high]


def read(files: InputFiles, start: int, stop: int) -> bytes:
    out = bytearray(stop - start)
    files.read("a", start, memoryview(out))
    return bytes(out)


def test_any_part_of_an_undamaged_file_is_read(files: VerifiedFiles) -> None:
    draw = random.Random(0)
    for _ in range(300):
        start, stop = sorted((draw.randrange(165), draw.randrange(165)))
        assert read(files, start, stop) == DATA[start:stop]


def test_damage_is_found_if_its_block_is_read(files: VerifiedFiles, tmp_path: Path) -> None:
    draw = random.Random(0)
    for _ in range(300):
        start, stop = sorted((draw.randrange(165), draw.randrange(165)))
        at = draw.randrange(164)
        (tmp_path / "part" / "a").write_bytes(DATA[:at] + bytes([DATA[at] ^ 1]) + DATA[at + 1 :])
        blocks = [(low, high) for low, high in blocks_with(start, stop) if low <= at < high] if start < stop else []
        if not blocks:
            with files:
                assert read(files, start, stop) == DATA[start:stop]
            continue
        with files, pytest.raises(CheckpointError) as caught:
            read(files, start, stop)
        (found,) = caught.value.problems
        assert found.code == "FSDP-E471"
        assert f"part/a: bytes {blocks[0][0]} to {blocks[0][1]} " in str(found) and f"w{blocks[0][0]}" in str(found)


def test_only_blocks_with_requested_bytes_are_read(
    files: VerifiedFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    touched: set[int] = set()
    plain = InputFiles.read

    def recording(self: InputFiles, file: str, offset: int, out: memoryview) -> None:
        touched.update(range(offset, offset + len(out)))
        plain(self, file, offset, out)

    def hashing(path: Path, start: int, stop: int) -> str:
        touched.update(range(start, stop))
        return hash_file(path, start, stop)

    monkeypatch.setattr(InputFiles, "read", recording)
    monkeypatch.setattr(hashes, "hash_file", hashing)
    read(files, 39, 42)
    assert touched == set(range(8, 100))


def test_read_beyond_the_saved_end_is_an_error(files: VerifiedFiles) -> None:
    with pytest.raises(CheckpointError, match="FSDP-E453"):
        read(files, 160, 170)


def test_file_that_is_not_in_the_manifest_is_refused(files: VerifiedFiles, tmp_path: Path) -> None:
    (tmp_path / "part" / "b").write_bytes(DATA)
    with pytest.raises(CheckpointError, match=r"part/b: is not listed in fsdp_manifest.json.*FSDP-E459"):
        files.read("b", 0, memoryview(bytearray(4)))


@pytest.mark.parametrize("world_size", [1, 3])
def test_headers_are_compared_by_one_rank_each(tmp_path: Path, world_size: int) -> None:
    folder = saved.local_checkpoint(tmp_path / "checkpoint-20", world_size=2)
    model, optimizer = read_stored_model(folder), read_stored_optimizer(folder)
    assert optimizer is not None
    for stored in (model, optimizer):
        # The others contain nothing but tensors and their frames, which are compared when the tensors are read.
        for file in [file for file in stored.files if file.endswith((".metadata", "__2_0.distcp"))]:
            path = folder / file
            data = path.read_bytes()
            damages.flip(path)
            caught = []
            for rank in range(world_size):
                with files_of_checkpoint(folder, stored, verify=True) as files:
                    try:
                        check_headers(files, stored, rank, world_size)
                    except CheckpointError as error:
                        caught.append(str(error))
            assert len(caught) == 1 and file in caught[0] and "FSDP-E471" in caught[0]
            path.write_bytes(data)
