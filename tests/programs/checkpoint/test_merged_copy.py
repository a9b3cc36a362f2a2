"""The merged copy of a checkpoint that ``from_pretrained`` reads."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hf_fsdp_plugin.checkpoint.names import merged_copies
from hf_fsdp_plugin.checkpoint.whole_weights import with_whole_weights
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.tools.merge.merge_plan import staging_path
from tests.support.merge_inputs import MODEL, TENSORS, assert_same, read


def test_copy_is_written_once(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    copy = with_whole_weights(checkpoint)
    assert_same(read(copy), TENSORS)
    assert "[FSDP-N436]" in capfd.readouterr().err
    assert with_whole_weights(checkpoint) == copy and not capfd.readouterr().err


def test_copy_follows_the_checkpoint(checkpoint: Path) -> None:
    before = with_whole_weights(checkpoint)
    os.utime(checkpoint / MODEL / ".metadata", ns=(1, 1))
    after = with_whole_weights(checkpoint)
    assert after != before and merged_copies(checkpoint) == [after]


def test_many_readers_share_one_copy(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = []
    readers = [threading.Thread(target=lambda: found.append(with_whole_weights(checkpoint))) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert len(found) == 8 and len(set(found)) == 1
    assert capfd.readouterr().err.count("FSDP-N436") == 1
    assert_same(read(found[0]), TENSORS)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin.index.json", "adapter_config.json"])
def test_folder_that_transformers_reads_is_unchanged(checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_text("{}")
    assert with_whole_weights(checkpoint) == checkpoint and not merged_copies(checkpoint)


def test_other_folders_are_unchanged(tmp_path: Path) -> None:
    assert with_whole_weights(tmp_path) == tmp_path
    assert with_whole_weights(tmp_path / "no folder") == tmp_path / "no folder"


def test_folder_that_cannot_be_written_is_an_error(checkpoint: Path) -> None:
    copy = with_whole_weights(checkpoint)
    for path in copy.iterdir():
        path.unlink()
    copy.rmdir()
    staging_path(copy).write_text("a file where the merge has its folder")
    with pytest.raises(CheckpointError, match=r"hf-fsdp merge") as error:
        with_whole_weights(checkpoint)
    assert [problem.code for problem in error.value.problems] == ["FSDP-E437"]


def test_damaged_checkpoint_is_an_error(checkpoint: Path) -> None:
    (checkpoint / MODEL / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError):
        with_whole_weights(checkpoint)
    assert not merged_copies(checkpoint)
