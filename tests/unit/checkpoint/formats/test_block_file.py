"""The hashes of a large checkpoint are in a file of their own, of which a reader reads only what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_fsdp_plugin.checkpoint import io
from hf_fsdp_plugin.checkpoint.checking.inspection import why_incomplete
from hf_fsdp_plugin.checkpoint.checking.verify import files_of_checkpoint
from hf_fsdp_plugin.checkpoint.formats import manifest
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
from hf_fsdp_plugin.checkpoint.formats.manifest import RECORD_SIZE, BlockTable, FileRange, FileRecord, read_manifest
from hf_fsdp_plugin.checkpoint.names import BLOCK_FILE, MANIFEST_NAME
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.tools.merge.merging import MergeOptions, merge
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support import damages, saved


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MAX_INLINE", 0)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return saved.local_checkpoint(tmp_path / "checkpoint-20")


def test_manifest_with_a_block_file_round_trips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved.local_checkpoint(tmp_path / "checkpoint-20")
    separate = read_manifest(folder)
    monkeypatch.setattr(manifest, "MAX_INLINE", 1000)
    written = saved.local_checkpoint(tmp_path / "checkpoint-30")
    inline = read_manifest(written)
    assert separate is not None and inline is not None
    assert (folder / BLOCK_FILE).is_file() and not (written / BLOCK_FILE).exists()
    for one, other in zip(separate.files, inline.files, strict=True):
        assert [(a.start, a.stop, a.name) for a in one.ranges] == [(b.start, b.stop, b.name) for b in other.ranges]
    assert any(isinstance(record.ranges, BlockTable) for record in separate.files)


def test_undamaged_checkpoint_is_verified_and_merged(local: Path, tmp_path: Path) -> None:
    assert verify(local, config_check=False).problems == ()
    assert why_incomplete(local) is None
    merge(local, tmp_path / "out", MergeOptions())


def test_every_damaged_byte_of_the_block_file_is_found(local: Path) -> None:
    whole = (local / BLOCK_FILE).read_bytes()
    for position in range(0, len(whole), 5):
        damages.flip(local / BLOCK_FILE, position)
        assert "fsdp_manifest.hashes" in saved.only_error(local, "FSDP-E464", config_check=False)
        (local / BLOCK_FILE).write_bytes(whole)


def test_damaged_hash_is_not_reported_as_a_damaged_file(local: Path, tmp_path: Path) -> None:
    damages.flip(local / BLOCK_FILE, RECORD_SIZE - 1)  # the hash of the first block, a header of the model or optimizer
    damages.flip(local / BLOCK_FILE, (local / BLOCK_FILE).stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"fsdp_manifest\.hashes: is damaged.*FSDP-E464"):
        merge(local, tmp_path / "out", MergeOptions())


@pytest.mark.parametrize("code", ["FSDP-E457", "FSDP-E470", "FSDP-E456"])
def test_block_file_of_other_size_or_kind_is_refused(local: Path, code: str) -> None:
    path = local / BLOCK_FILE
    data = path.read_bytes()
    path.unlink()
    if code == "FSDP-E470":
        path.write_bytes(data[:-1])
    elif code == "FSDP-E456":
        path.symlink_to(local.parent / "elsewhere")
        (local.parent / "elsewhere").write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"fsdp_manifest\.hashes: .*{code}"):
        read_manifest(local)
    assert why_incomplete(local) is not None


def test_damage_names_the_block_and_its_tensor(local: Path, tmp_path: Path) -> None:
    piece = read_stored_model(local).tensors["norm.weight"].pieces[1]
    damages.flip(local / piece.file, piece.offset)
    text = saved.only_error(local, "FSDP-E471", config_check=False)
    with pytest.raises(CheckpointError) as caught:
        merge(local, tmp_path / "out", MergeOptions())
    assert str(caught.value) == text and "norm.weight" in text
    merge(local, tmp_path / "out", MergeOptions(verify_input=False))


def test_reader_reads_records_of_its_files_only(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    plain = io.hash_bytes
    monkeypatch.setattr(io, "hash_bytes", lambda data: read.append(len(data)) or plain(data))
    model = read_stored_model(local)
    piece = next(iter(model.tensors.values())).pieces[0]
    with files_of_checkpoint(local, model, verify=True) as files:
        files.read(piece.file, piece.offset, memoryview(bytearray(4)))
    found = read_manifest(local)
    assert found is not None
    (ranges,) = (record.ranges for record in found.files if record.path == piece.file)
    assert isinstance(ranges, BlockTable)
    manifests = (local / MANIFEST_NAME).stat().st_size
    assert [size for size in read if size < manifests // 2] == [len(ranges) * RECORD_SIZE]


def test_manifest_of_1024_ranks_and_70_b_parameters_is_small(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.self_attn.q_proj_{n}.weight" for layer in range(80) for n in range(9)]
    keys = [f"state.{name}.{key}" for name in names for key in ("exp_avg", "exp_avg_sq", "step")]
    ranges = [FileRange(start=n, stop=n + 1, hash="0" * 32, name=name) for n, name in enumerate([*names, *keys])]
    few = tuple(ranges[:2])  # the manifest does not contain the ranges, but all of their names
    files = [FileRecord(path="model", size=len(ranges), ranges=tuple(ranges))]
    for rank in range(1024):
        for part in ("pytorch_model_fsdp_0", "optimizer_0"):
            files.append(FileRecord(path=f"{part}/__{rank}_0.distcp", size=2, ranges=few))
        files.append(FileRecord(path=f"rng_state_{rank}.pth", size=1, ranges=few[:1]))
    parameters = dict.fromkeys(names, ("float32", (8192, 8192)))
    manifest.write_manifest(tmp_path, saved.manifest(files=tuple(files), parameters=parameters))
    assert (tmp_path / MANIFEST_NAME).stat().st_size < 10e6 / 5
