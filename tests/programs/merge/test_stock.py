"""Merges of checkpoints of the stock stack, which are compared with the model of a config."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
from hf_fsdp_plugin.problems import CheckpointError
from hf_fsdp_plugin.tools.merge.merging import MergeOptions, merge
from hf_fsdp_plugin.tools.verify.comparison import config_problems
from tests.support import saved
from tests.support.merge_inputs import MODEL, codes, messages, read, tree

State = dict[str, torch.Tensor]


def stock(folder: Path, change: Callable[[State], object] = lambda _: None) -> Path:
    """Write the checkpoint of a tiny model as ``save_state`` does without the plugin, and its config."""
    model = saved.tiny_llama()
    state = dict(model.state_dict())
    change(state)
    dcp.save({"model": state}, checkpoint_id=folder / MODEL, no_dist=True)
    (folder / "trainer_state.json").write_text("{}")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    return folder


def refusal(checkpoint: Path, out: Path) -> str:
    """Return the message of a merge that is refused, after a check that it leaves nothing behind."""
    before = tree(out.parent)
    with pytest.raises(CheckpointError) as caught:
        merge(checkpoint, out, MergeOptions())
    assert tree(out.parent) == before and not out.exists()
    assert not list(out.parent.glob(".*"))
    return str(caught.value)


def test_merged_bytes_equal_those_of_accelerate(tmp_path: Path, out: Path) -> None:
    from accelerate.utils.fsdp_utils import merge_fsdp_weights

    checkpoint = stock(tmp_path / "run", lambda state: state.update({"lm_head.weight": torch.randn(32, 16).bfloat16()}))
    merge_fsdp_weights(str(checkpoint / MODEL), str(tmp_path / "theirs"))
    assert merge(checkpoint, out, MergeOptions()).compared_with == "model"
    ours, theirs = (_as_torch(folder) for folder in (out, tmp_path / "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


def _as_torch(folder: Path) -> State:
    from safetensors.torch import load_file

    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _damage(state: State) -> None:
    """Remove a weight, add one, and resize one."""
    del state["model.norm.weight"]
    state["model.norm.bias"] = torch.zeros(16)
    state["lm_head.weight"] = torch.zeros(8, 16)


DAMAGES: dict[str, tuple[Callable[[State], Any], list[str]]] = {
    "all": (_damage, ["FSDP-E477", "FSDP-E478", "FSDP-E479"]),
    "missing": (lambda state: state.pop("model.norm.weight"), ["FSDP-E477"]),
    "additional": (lambda state: state.update({"model.norm.bias": torch.zeros(16)}), ["FSDP-E478"]),
    "resized": (lambda state: state.update({"lm_head.weight": torch.zeros(8, 16)}), ["FSDP-E479"]),
}


@pytest.mark.parametrize(
    "damage", [name if name == "all" else pytest.param(name, marks=pytest.mark.slow) for name in DAMAGES]
)
def test_another_model_is_refused_as_with_torch(tmp_path: Path, out: Path, damage: str) -> None:
    change, expected = DAMAGES[damage]
    checkpoint = stock(tmp_path / "run", change)
    found = config_problems(read_stored_model(checkpoint), checkpoint)
    assert [problem.code for problem in found] == expected
    assert refusal(checkpoint, out) == str(CheckpointError(found))


def test_missing_transformers_is_noted(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Transformers there is no model. The weights are merged, and the result does not claim a comparison."""
    checkpoint, names = stock(tmp_path / "run"), saved.tiny_llama().state_dict().keys()
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "hf_fsdp_plugin.tools.meta_model", raising=False)
    merged = merge(checkpoint, out, MergeOptions())
    assert (merged.compared_with, codes(merged)) == ("", ["FSDP-N475"]) and "transformers" in messages(merged)
    assert read(out).keys() == names
