"""A folder of a sharded model has the files and the names that one process writes, also if they depend on the class."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, dynamic_module_utils

from tests.gloo.remote_model import RemoteConfig, RemoteForCausalLM
from tests.support.matrices import slow
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config
from tests.support.training import adamw, fresh_accelerator


def gpt_neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config)


def segformer() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16], decoder_hidden_size=16, num_labels=3,
        num_attention_heads=[1, 1, 2, 2], drop_path_rate=0.0,
    )  # fmt: skip
    return SegformerForSemanticSegmentation(config)


def beit() -> nn.Module:
    from transformers import BeitConfig, BeitForSemanticSegmentation

    config = BeitConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2, image_size=32, patch_size=8,
        out_indices=[1, 2, 3, 4], num_labels=3, drop_path_rate=0.0,
    )  # fmt: skip
    return BeitForSemanticSegmentation(config)


def remote() -> nn.Module:
    RemoteConfig.register_for_auto_class()
    RemoteForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    return RemoteForCausalLM(RemoteConfig())


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "gpt_neox": gpt_neox, "segformer": segformer, "beit": beit, "remote": remote,
}  # fmt: skip


def contents(folder: Path) -> dict[str, Any]:
    """The files of a folder; the JSON of the configs, the text of the code."""
    files = {path.name: path for path in folder.iterdir() if path.name != "fsdp_manifest.json"}
    return {
        name: json.loads(path.read_text()) if path.suffix == ".json" else path.suffix == ".py" and path.read_text()
        for name, path in files.items()
    }


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    if name in ("segformer", "beit"):
        labels = torch.randint(0, 3, (2, 32, 32), generator=random)
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=random), "labels": labels}
    tokens = torch.randint(0, 96, (2, 12), generator=random)
    return {"input_ids": tokens, "labels": tokens}


def train_and_save(folder: str, name: str, version: int) -> dict[str, Any]:
    """Train a step, and save in three ways. Returns the whole weights."""
    torch.manual_seed(0)
    model = BUILDERS[name]()
    accelerator = fresh_accelerator(parallel_config("full_shard", version, dist.get_world_size()))
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.backward(model(**inputs_of(name)).loss)
    optimizer.step()
    inner: Any = accelerator.unwrap_model(model)
    inner.save_pretrained(f"{folder}/pretrained", is_main_process=accelerator.is_main_process)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        inner.save_pretrained(f"{folder}/given", state_dict=dict(state))
    dist.barrier()
    return {"weights": {key: tensor.clone() for key, tensor in state.items()}, "class": str(type(inner))}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("name", ["gpt_neox", "remote", slow("segformer"), slow("beit")])
def test_saved_folder_equals_that_of_one_process(two_ranks: Ranks, tmp_path: Path, name: str, version: int) -> None:
    weights = two_ranks.run(train_and_save, str(tmp_path), name, version)[0]["weights"]
    model: Any = BUILDERS[name]()
    model.load_state_dict(weights)
    model.save_pretrained(tmp_path / "one_process")
    expected = load_file(tmp_path / "one_process" / "model.safetensors")
    for form in ("pretrained", "given"):
        assert contents(tmp_path / form) == contents(tmp_path / "one_process"), form
        found = load_file(tmp_path / form / "model.safetensors")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("version", [1, 2])
def test_saved_custom_code_loads(
    two_ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    weights = two_ranks.run(train_and_save, str(tmp_path), "remote", version)[0]["weights"]
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained", trust_remote_code=True)
    assert type(loaded).__module__.startswith("transformers_modules.") and type(loaded).__name__ == "RemoteForCausalLM"
    assert all(torch.equal(tensor, weights[key]) for key, tensor in loaded.state_dict().items())
