"""A merge writes the model of a checkpoint, and changes nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors import safe_open

from hf_fsdp_plugin.checkpoint.checking import hashes
from hf_fsdp_plugin.checkpoint.formats import manifest
from hf_fsdp_plugin.tools.merge import copying, merging
from hf_fsdp_plugin.tools.merge.merging import MergeOptions, merge
from tests.support import saved
from tests.support.merge_inputs import CONFIG, TENSORS, assert_same, codes, messages, read, save


def test_files_of_all_ranks_become_one_file(checkpoint: Path, out: Path) -> None:
    merged = merge(checkpoint, out, MergeOptions())
    assert_same(read(out))
    assert merged.compared_with == "manifest"
    assert sorted(path.name for path in out.parent.iterdir()) == ["merged", "run"]


def test_shards_have_an_index(checkpoint: Path, out: Path) -> None:
    merged = merge(checkpoint, out, MergeOptions(max_shard_size=250))
    assert_same(read(out))
    assert len(merged.files) == 3
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == TENSORS.keys()
    for name, file in index["weight_map"].items():
        with safe_open(out / file, "np") as opened:
            assert name in opened.keys()  # noqa: SIM118 (not a mapping)


def test_tied_names_of_the_manifest_are_written_once(tmp_path: Path, out: Path) -> None:
    tensors = {name: whole for name, whole in TENSORS.items() if name != "lm_head.weight"}
    folder = save(tmp_path / "ck", tensors, ties=[("model.embed_tokens.weight", "lm_head.weight")])
    merged = merge(folder, out, MergeOptions())
    assert_same(read(out), tensors)
    assert "FSDP-N491" in codes(merged)
    assert "'lm_head.weight' (tied to 'model.embed_tokens.weight')" in messages(merged)


def test_dtype_is_converted_and_set_in_the_config(checkpoint: Path, out: Path) -> None:
    (checkpoint / "config.json").write_text(json.dumps(CONFIG))
    merge(checkpoint, out, MergeOptions(dtype="bfloat16", verify=True))
    with safe_open(out / "model.safetensors", "np") as opened:
        dtypes = {name: opened.get_slice(name).get_dtype() for name in TENSORS}
    assert dtypes == {**dict.fromkeys(TENSORS, "BF16"), "model.steps": "I64"}
    config = json.loads((out / "config.json").read_text())
    assert (config["dtype"], config["text_config"]["torch_dtype"]) == ("bfloat16", "bfloat16")


def test_overflow_is_reported_with_the_parameter(checkpoint: Path, out: Path) -> None:
    merged = merge(checkpoint, out, MergeOptions(dtype="float16"))
    count = int((numpy.abs(TENSORS["lm_head.weight"]) >= 65520).sum())
    (warning,) = [problem.message for problem in merged.problems if problem.code == "FSDP-W494"]
    assert "float16" in warning and f": {count} of 'lm_head.weight'." in warning


def test_adapter_keeps_its_names(tmp_path: Path, out: Path) -> None:
    adapter = {f"base_model.model.q_proj.lora_{part}.weight": numpy.ones((2, 3), "<f4") for part in "AB"}
    folder = save(tmp_path / "ck", adapter)
    (folder / "adapter_config.json").write_text("{}")
    base = {"base_model.model.q_proj.base_layer.weight": ("float32", (3, 3))}  # not in the checkpoint
    saved.write_manifest(
        folder, parameters={**base, **{name: ("float32", whole.shape) for name, whole in adapter.items()}}
    )
    merged = merge(folder, out, MergeOptions(max_shard_size=1))
    assert merged.files == ["adapter_model.safetensors"]
    assert codes(merged) == ["FSDP-N492"]
    assert_same(read(out), adapter)


def test_large_tensor_is_copied_in_blocks(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"weight": numpy.arange(90 * 101, dtype="<f4").reshape(90, 101)}
    folder = save(tmp_path / "ck", large)
    sizes = []
    monkeypatch.setattr(copying, "BLOCK", 2048)
    merge(folder, out, MergeOptions(), lambda step, count, total: sizes.append(count))
    assert_same(read(out), large)
    assert sizes[1:] == [8192] * 4 + [4 * (90 * 101 - 4 * 2048)]


def test_names_of_peft_and_omitted_objects_are_reported(tmp_path: Path, out: Path) -> None:
    import torch

    name = "base_model.model.q_proj.base_layer.weight"
    (tmp_path / "ck").mkdir()
    torch.save({name: torch.ones(3, 3), "extra_state": {"seen": 3}}, tmp_path / "ck" / "pytorch_model_fsdp.bin")
    merged = merge(tmp_path / "ck", out, MergeOptions(delete_input=True))
    assert codes(merged) == ["FSDP-W488", "FSDP-W499", "FSDP-W493", "FSDP-E487"]
    assert "extra_state" in messages(merged)
    assert list(read(out)) == [name]


def test_manifest_is_read_once_for_the_tensors(checkpoint: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest of a large checkpoint has millions of hashes."""
    reads = []

    def read_manifest(folder: Path) -> Any:
        reads.append(folder)
        return manifest.read_manifest(folder)

    for module in (merging, hashes):
        monkeypatch.setattr(module, "read_manifest", read_manifest)
    merge(checkpoint, out, MergeOptions(verify=True))
    assert reads == [checkpoint]
