"""Runs start from converted folders, files of torch's safetensors writer are read, and adapters of runs are folded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import fsdp_utils
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from hf_fsdp_plugin.checkpoint.formats.known_formats import read_stored_model
from hf_fsdp_plugin.tools.convert.model_folder import convert_model_folder
from hf_fsdp_plugin.tools.merge.merging import MergeOptions, merge
from hf_fsdp_plugin.tools.verify.verification import verify
from tests.support.matrices import slow
from tests.support.merge_inputs import MODEL
from tests.support.peft_runs import adapted_llama
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config, tiny_llama
from tests.support.trainer_runs import make_trainer
from tests.support.training import adamw, fresh_accelerator, loss_of

State = dict[str, torch.Tensor]


def assert_equal(found: State, wanted: State) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)] == []


def empty_llama() -> nn.Module:
    model = tiny_llama(tied=True)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model


def start(folder: str, version: int, how: str) -> State:
    """The weights of a run that starts from a converted folder, with this package."""
    accelerator = fresh_accelerator(parallel_config("full_shard", version, dist.get_world_size()))
    model = accelerator.prepare(empty_llama())
    if how == "load_state":
        accelerator.load_state(folder)
    else:
        fsdp_utils.load_fsdp_model(accelerator.state.fsdp_plugin, accelerator, model, folder)
    return {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}


def start_without_package(folder: str, version: int) -> State:
    """The same with torch's functions, which stock Accelerate calls."""
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), empty_llama()
    sharded: Any = fully_shard(model, mesh=mesh) if version == 2 else None
    if sharded is None:
        sharded = FullyShardedDataParallel(model, device_mesh=mesh, use_orig_params=True, device_id=torch.device("cpu"))
    state = get_model_state_dict(sharded)
    dcp.load({"model": state}, checkpoint_id=Path(folder) / MODEL)
    set_model_state_dict(sharded, state)
    found = get_model_state_dict(sharded)
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in found.items()}


@pytest.mark.parametrize("how", ["load_fsdp_model", slow("load_state"), "torch"])
@pytest.mark.parametrize("version", [1, 2])
def test_run_starts_from_a_converted_folder(two_ranks: Ranks, version: int, how: str, tmp_path: Path) -> None:
    model: Any = tiny_llama(tied=True)
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    out = tmp_path / "out"
    convert_model_folder(tmp_path / "hf", out, dtype=None, force=False, progress=lambda *_: None)
    if how == "torch":
        found = two_ranks.run(start_without_package, str(out), version)[0]
    else:
        found = two_ranks.run(start, str(out), version, how)[0]
    assert_equal(found, model.state_dict())


MAPPING = "mapping"


def save_by_torch(folder: str, **settings: Any) -> None:
    model: Any = fully_shard(tiny_llama(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    state = get_model_state_dict(model)
    if settings.pop(MAPPING, False):
        settings["fqn_to_index_mapping"] = {name: 1 + number % 2 for number, name in enumerate(state)}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, **settings))
    if dist.get_rank() == 0:
        model.config.architectures = [type(tiny_llama()).__name__]
        model.config.save_pretrained(folder)


WRITERS: dict[str, tuple[dict[str, Any], str]] = {
    "shards": ({"save_distributed": True}, "hf_shards"),
    "several files": ({"save_distributed": True, MAPPING: True}, "hf_shards"),
    "consolidated": ({"save_distributed": True, "enable_consolidation": True, MAPPING: True}, "full"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_files_of_torch_are_verified_and_merged(two_ranks: Ranks, name: str, tmp_path: Path) -> None:
    settings, form = WRITERS[name]
    folder = tmp_path / "saved"
    two_ranks.run(save_by_torch, str(folder), **settings)
    folders = [folder] if name != "consolidated" else [folder, folder / "sharded"]
    for place in folders:
        assert read_stored_model(place).format == (form if place == folder else "hf_shards")
        assert verify(place).ok
        merge(place, tmp_path / f"{place.name}-merged", MergeOptions(config=folder, verify=True))
        _assert_loads(tmp_path / f"{place.name}-merged", tiny_llama().state_dict())
    if name == "consolidated":  # an interrupted consolidation leaves the shards
        for path in folder.glob("model*"):
            path.unlink()
        assert read_stored_model(folder).format == "hf_shards" and verify(folder).ok


def _assert_loads(folder: Path, wanted: State) -> None:
    from transformers import AutoModelForCausalLM

    assert_equal(AutoModelForCausalLM.from_pretrained(folder).state_dict(), wanted)


def train_adapter(folder: str, kind: str, version: int, how: str) -> tuple[State, str]:
    """Train an adapter, and save a checkpoint. Returns all weights of the model, and the checkpoint."""
    settings = parallel_config("full_shard", version, dist.get_world_size())
    if how == "trainer":
        config = {key.removeprefix("fsdp_"): value for key, value in settings["fsdp_config"].items()}
        trainer = make_trainer(
            folder, adapted_llama(kind), fsdp=True, fsdp_config=config, max_steps=2, save_strategy="steps", save_steps=2
        )
        trainer.train()
        accelerator, model, checkpoint = trainer.accelerator, trainer.model_wrapped, f"{folder}/checkpoint-2"
    else:
        accelerator, checkpoint = fresh_accelerator(settings), f"{folder}/checkpoint_0"
        raw = adapted_llama(kind)
        model, optimizer = accelerator.prepare(raw, adamw(raw))
        accelerator.backward(loss_of(model, "llama", 0, dist.get_rank(), dist.get_world_size()))
        optimizer.step()
        accelerator.save_state(checkpoint)
        if dist.get_rank() == 0:
            adapted: Any = adapted_llama(kind)
            adapted.peft_config["default"].save_pretrained(checkpoint)
    dist.barrier()
    return {name: tensor.clone() for name, tensor in accelerator.get_state_dict(model).items()}, checkpoint


@pytest.mark.parametrize("how", ["trainer", "accelerate"])
@pytest.mark.parametrize(
    ("kind", "version"), [("lora", 2), ("modules", 1), slow("dora", 2), slow("embedding", 1), slow("parameters", 2)]
)
def test_adapter_of_a_run_is_folded(two_ranks: Ranks, kind: str, version: int, how: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    base: Any = tiny_llama(layers=2)
    base.save_pretrained(tmp_path / "base")
    state, checkpoint = two_ranks.run(train_adapter, str(tmp_path / "run"), kind, version, how)[0]
    model: Any = adapted_llama(kind)
    assert not model.load_state_dict(state, strict=False).unexpected_keys
    merge(Path(checkpoint), tmp_path / "out", MergeOptions(fold_adapter=tmp_path / "base", verify=True))
    _assert_loads(tmp_path / "out", model.merge_and_unload().state_dict())
