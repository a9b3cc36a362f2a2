"""The headers of a model with many files are read by one rank of a machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hf_fsdp_plugin.backends.shared_weights import WeightExchange
from hf_fsdp_plugin.integrations.transformers import model_files
from hf_fsdp_plugin.problems import CheckpointError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux only")


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Two files of a model, which is read by one of two ranks of a machine."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", str(tmp_path))
    monkeypatch.setattr(model_files, "exchange", exchange := WeightExchange())
    monkeypatch.setattr(model_files, "_MIN_SHARED_FILES", 2)
    paths = [str(tmp_path / f"{number}.safetensors") for number in range(2)]
    for number, path in enumerate(paths):
        save_file({f"{number}.{size}": torch.zeros(size, 2) for size in (0, 3, 4)} | {"both": torch.zeros(1)}, path)
    yield paths
    exchange.close()


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    reads: list[Any] = []
    original = model_files.read_model_headers

    def read(files: Any) -> Any:
        reads.append(files)
        return original(files)

    monkeypatch.setattr(model_files, "read_model_headers", read)
    return reads


def test_second_rank_gets_the_same_headers(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    reads = count_reads(monkeypatch)
    first, second = model_files.read_headers(files), model_files.read_headers(files)
    assert first == second and len(first) == 7 and first["1.3"] == (files[1], (3, 2), "float32")
    assert all(type(tensor) is type(first["both"]) for tensor in second.values())
    assert len(reads) == 1


def test_changed_or_few_files_are_read_again(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    reads = count_reads(monkeypatch)
    model_files.read_headers(files)
    save_file({"new": torch.zeros(5)}, files[1])
    assert "new" in model_files.read_headers(files)
    model_files.read_headers(files[:1])
    model_files.read_headers(files[:1])
    assert len(reads) == 4


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_every_rank_finds_the_damaged_file(files: list[str], damage: str) -> None:
    path = Path(files[1])
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    errors = []
    for _ in range(2):
        with pytest.raises(CheckpointError) as error:
            model_files.read_headers(files)
        errors.append(str(error.value))
    assert errors[0] == errors[1] and files[1] in errors[0]
