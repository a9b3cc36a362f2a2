"""The checksums in the archives of torch.save."""

import random

import pytest
import torch

from hf_fsdp_plugin.tools.verify.archives import NotAnArchive, crc_file, stored_entries


def test_archives_without_checksums_are_accepted(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(100)}, tmp_path / "a.bin")
    finally:
        torch.serialization.set_crc32_options(before)
    torch.save({"a": torch.ones(100)}, tmp_path / "b.bin")
    without, with_them = (list(stored_entries(tmp_path / name)) for name in ("a.bin", "b.bin"))
    assert {entry.crc for entry in without} == {0}
    assert all(entry.crc == crc_file(tmp_path / "b.bin", entry.start, entry.stop) for entry in with_them)


def test_bytes_between_archives_are_reported(tmp_path):
    torch.save({"a": torch.ones(100)}, tmp_path / "a.bin")
    data = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "two").write_bytes(data + data)
    assert len(list(stored_entries(tmp_path / "two"))) == 2 * len(list(stored_entries(tmp_path / "a.bin")))
    (tmp_path / "torn").write_bytes(data + b"gap" + data)
    with pytest.raises(NotAnArchive, match=f"before {len(data) + 3:,} "):
        list(stored_entries(tmp_path / "torn"))


@pytest.mark.parametrize("seed", range(200))
def test_damaged_archive_never_crashes(tmp_path, seed):
    chance = random.Random(seed)
    torch.save({"a": torch.ones(8)}, tmp_path / "a")
    data = bytearray((tmp_path / "a").read_bytes())
    for _ in range(chance.randrange(1, 6)):
        data[chance.randrange(len(data) - 700, len(data))] = chance.choice([0, 255, chance.randrange(256)])
    (tmp_path / "a").write_bytes(data)
    try:
        for entry in stored_entries(tmp_path / "a"):
            assert entry.start >= 0 and isinstance(crc_file(tmp_path / "a", entry.start, entry.stop), int)
    except NotAnArchive as error:
        assert error.stop == len(data)
