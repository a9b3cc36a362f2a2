"""Folders that torch's ``HuggingFaceStorageWriter`` has saved as ``{"model": state}`` begin all names by ``model.``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
from hf_fsdp_plugin.tools.convert.model_folder import convert_model_folder
from hf_fsdp_plugin.tools.merge.merging import MergeOptions, merge
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.programs.merge.test_fold_adapter import QV, adapted, assert_same_model, save_base
from tests.support.merge_inputs import codes, read
from tests.support.tiny import tiny_gpt2, tiny_llama

MAKERS: dict[str, Callable[[], Any]] = {
    "llama": tiny_llama,
    "tied": lambda: tiny_llama(tied=True),
    "gpt2": tiny_gpt2,
}


def save(folder: Path, model: Any, *, shards: bool, config: bool = True, state: Any = None) -> Path:
    """Save a model as torch's writer does in a loop that names the parts of its state."""
    state = {name: tensor.clone() for name, tensor in (state or model.state_dict()).items()}
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=shards)
    dcp.save({"model": state}, storage_writer=writer, no_dist=True)
    if config:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("shards", [False, True], ids=["whole", "shards"])
@pytest.mark.parametrize("name", MAKERS)
def test_nested_model_is_verified_merged_and_converted(name: str, shards: bool, tmp_path: Path) -> None:
    model = MAKERS[name]()
    folder = save(tmp_path / "saved", model, shards=shards)
    assert all(name.startswith("model.") for name in read_stored_model(folder).tensors)
    assert verify(folder).ok
    merged = merge(folder, tmp_path / "out", MergeOptions(verify=True))
    assert merged.compared_with == "model" and codes(merged) == []
    assert_same_model(tmp_path / "out", model)
    assert read(tmp_path / "out").keys() <= model.state_dict().keys()
    convert_model_folder(folder, tmp_path / "shards", dtype=None, force=False, progress=lambda *_: None)
    assert read_stored_model(tmp_path / "shards").tensors.keys() == model.state_dict().keys()


@pytest.mark.parametrize("shards", [False, True], ids=["whole", "shards"])
@pytest.mark.parametrize("form", ["whole model", "adapter", "add_adapter"])
def test_nested_adapter_is_folded(form: str, shards: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = save_base(tmp_path / "base")
    model = adapted(base, {"target_modules": QV})
    state = model.state_dict() if form != "adapter" else peft.get_peft_model_state_dict(model)
    if form == "add_adapter":
        state = {name.removeprefix("base_model.model."): tensor for name, tensor in state.items()}
    save(tmp_path / "run", model, shards=shards, config=False, state=state)
    model.peft_config["default"].save_pretrained(tmp_path / "run")
    nested = save(tmp_path / "nested", tiny_llama(layers=2), shards=shards, state=read_base(base))
    for place in (base, nested):
        merge(tmp_path / "run", tmp_path / f"out-{place.name}", MergeOptions(fold_adapter=place))
    merged = model.merge_and_unload()
    assert_same_model(tmp_path / "out-base", merged)
    assert_same_model(tmp_path / "out-nested", merged)


def read_base(folder: Path) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in read(folder).items()}


def test_names_of_the_model_are_kept(tmp_path: Path) -> None:
    """All names in a folder with tied embeddings begin with the name of a module."""
    model: Any = tiny_llama(tied=True)
    model.save_pretrained(tmp_path / "hf")
    merge(tmp_path / "hf", tmp_path / "out", MergeOptions())
    assert read(tmp_path / "out").keys() == read(tmp_path / "hf").keys()
    assert all(name.startswith("model.") for name in read(tmp_path / "out"))
