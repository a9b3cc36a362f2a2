"""Checks of input and output, and the deletion of the input after them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from hf_fsdp_plugin.checkpoint.formats.boxes import whole_box
from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.tools.merge import copying
from hf_fsdp_plugin.tools.merge.merge_plan import staging_path
from hf_fsdp_plugin.tools.merge.merging import MergeOptions, merge
from tests.support import damages, saved
from tests.support.merge_inputs import MODEL, TENSORS, assert_same, codes, read, tree


def test_model_that_lacks_parameters_is_refused(checkpoint: Path, out: Path) -> None:
    saved.write_manifest(checkpoint, parameters={"model.gone": ("float32", ())})
    with pytest.raises(CheckpointError, match=r": model.gone\..*FSDP-E477"):
        merge(checkpoint, out, MergeOptions())


def test_verify_finds_a_flipped_bit_of_the_output(checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = copying.copy_file

    def damaging(source: Any, plan: Any, file: Any, path: Path, progress: Any) -> Any:
        infinite = copy(source, plan, file, path, progress)
        damages.flip(path, -1)
        return infinite

    monkeypatch.setattr(copying, "copy_file", damaging)
    before = tree(checkpoint)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight.*FSDP-E486"):
        merge(checkpoint, out, MergeOptions(delete_input=True))
    assert tree(checkpoint) == before
    assert not out.exists()
    assert not staging_path(out).exists()


def test_verify_finds_a_flipped_bit_of_the_input(checkpoint: Path, out: Path) -> None:
    tensor = read_stored_model(checkpoint).tensors["model.norm.weight"]
    (_, (piece, _, offset)) = tensor.parts_of(whole_box(tensor.shape))
    damages.flip(checkpoint / piece.file, offset)
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: .*FSDP-E471"):
        merge(checkpoint, out, MergeOptions(verify=True))
    assert not out.exists()


def test_delete_input_deletes_the_merged_files_only(checkpoint: Path, out: Path) -> None:
    before = tree(checkpoint)
    merged = merge(checkpoint, out, MergeOptions(delete_input=True))
    assert (merged.verified, merged.deleted) == (True, True)
    assert_same(read(out))
    assert tree(checkpoint) == {name: data for name, data in before.items() if not name.startswith(MODEL)}
    assert not (checkpoint / MODEL).exists()


def test_input_is_kept_without_a_model_to_compare(tmp_path: Path, out: Path) -> None:
    (tmp_path / "ck").mkdir()
    save_file(TENSORS, tmp_path / "ck" / "model.safetensors")
    before = tree(tmp_path / "ck")
    merged = merge(tmp_path / "ck", out, MergeOptions(delete_input=True))
    assert "FSDP-E487" in codes(merged)
    assert tree(tmp_path / "ck") == before
    assert_same(read(out))
