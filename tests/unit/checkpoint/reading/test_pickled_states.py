"""Which files each rank checks before a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_fsdp_plugin.checkpoint.reading import pickled_states
from hf_fsdp_plugin.checkpoint.reading.pickled_states import check_states
from hf_fsdp_plugin.problems import CheckpointError

SHARED = ["custom_checkpoint_0.pkl", "scheduler.pt", "trainer_state.json"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name in (*SHARED, "rng_state.pth", *(f"{stem}_{rank}.{end}" for rank in range(3) for stem, end in RNG)):
        torch.save({"file": name}, tmp_path / name)
    (tmp_path / "notes.txt").write_text("of the user")
    return tmp_path


RNG = (("rng_state", "pth"), ("random_states", "pkl"))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_only_rank_0_lists_the_folder(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Each rank knows the names of its own files. The names of the others come from rank 0."""
    read, listed = [], []
    listdir = Path.iterdir
    monkeypatch.setattr(pickled_states, "broadcast_object", lambda own: own if rank == 0 else SHARED)
    monkeypatch.setattr(pickled_states, "load_state_file", lambda path, only_check: read.append(path.name))
    monkeypatch.setattr(Path, "iterdir", lambda folder: listed.append(folder) or listdir(folder))
    check_states(checkpoint, rank, 3, verify=False)
    own = {f"rng_state_{rank}.pth", f"random_states_{rank}.pkl"} | ({"rng_state.pth"} if rank == 0 else set())
    assert set(read) == own | {SHARED[rank]} - {"trainer_state.json"}
    assert len(listed) == (rank == 0)


def test_checksums_replace_a_missing_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickled_states, "broadcast_object", lambda own: own)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    torch.save({"last_epoch": torch.ones(100)}, tmp_path / "scheduler.pt")
    torch.serialization.set_crc32_options(before)
    check_states(tmp_path, 0, 1)
    torch.save({"last_epoch": torch.ones(100)}, tmp_path / "scheduler.pt")
    check_states(tmp_path, 0, 1)
    data = (tmp_path / "scheduler.pt").read_bytes()
    (tmp_path / "scheduler.pt").write_bytes(data.replace(torch.ones(1).numpy().tobytes(), b"abcd", 1))
    with pytest.raises(CheckpointError, match=r"scheduler\.pt: .*FSDP-E471"):
        check_states(tmp_path, 0, 1)
