"""Cases that ranks run: shards are taken from mapped files, and nothing is broadcast that all ranks have mapped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.backends.loading.weight_loader import BROADCAST_ATTRIBUTE, WeightLoader
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.torch_private.modules import local_tensor
from tests.gloo.cases_families import clones
from tests.support.model_families import FAMILIES
from tests.support.ranks import own_device
from tests.support.training import fresh_accelerator


def save_and_read(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save a model on rank 0, and return the parameters and buffers of a model that one process loads."""
    if dist.get_rank() == 0:
        FAMILIES[family].build().save_pretrained(folder)
    dist.barrier()
    model = FAMILIES[family].model.from_pretrained(folder)
    return clones({**dict(model.named_parameters()), **dict(model.named_buffers())})


def load_families(folder: str, config: dict[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    """Load and shard each model. Returns what was taken from files, and the names of tensors that are not equal."""
    found = {}
    for name in names:
        path = Path(folder) / name
        expected = save_and_read(name, path)
        accelerator = fresh_accelerator(config)
        model = accelerator.prepare(FAMILIES[name].model.from_pretrained(path))
        record = getattr(model, BROADCAST_ATTRIBUTE)
        loaded = {**clones(accelerator.get_state_dict(model)), **clones(dict(unwrapped(model).named_buffers()))}
        found[name] = {
            "from_files": record.num_from_files,
            "broadcast": record.num_tensors,
            "parameters": len(expected) - len(dict(unwrapped(model).named_buffers())),
            "buffers": len(dict(unwrapped(model).named_buffers())),
            "different": [
                key for key, tensor in expected.items() if key in loaded and not torch.equal(tensor, loaded[key])
            ],
            "compared": sum(key in loaded for key in expected),
        }
    return found


def load_one(folder: str, config: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    """Load and shard a Llama; return the record, the shards, and what the report says about the loading."""
    accelerator = fresh_accelerator(config)
    model = FAMILIES["llama"].model.from_pretrained(folder, dtype=dtype)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    weights = clones(accelerator.get_state_dict(model))
    batch = FAMILIES["llama"].batch(0)
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    rows = hfp.report(accelerator).to_json()["settings"]
    record = getattr(model, BROADCAST_ATTRIBUTE)
    return {
        "from_files": record.num_from_files,
        "broadcast": record.num_tensors,
        "weights": weights,
        "local": {parameter.dtype for parameter in model.parameters()},
        "loading": [row for row in rows if row["setting"].startswith("loading.")][-1],
    }


def count_read_bytes(folder: str, config: dict[str, Any]) -> dict[str, int]:
    """Load and shard a Llama. Returns the bytes that were copied from the file, and those of the shards."""
    read: list[int] = []
    original = WeightLoader.copy_part

    def counted(loader: WeightLoader, into: torch.Tensor, part: torch.Tensor) -> None:
        read.append(part.nbytes)
        original(loader, into, part)

    accelerator = fresh_accelerator(config)
    model = FAMILIES["llama"].model.from_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightLoader, "copy_part", counted)
        model = accelerator.prepare(model)
    shards = {id(parameter): local_tensor(parameter) for parameter in model.parameters()}
    return {"read": sum(read), "shards": sum(shard.nbytes for shard in shards.values())}


def change_one_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] += 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def load_copies(folder: str, config: dict[str, Any], changed: bool) -> dict[str, Any]:
    """Each rank loads a copy of its own, as machines with their own disks do; rank 1's may have another weight."""
    rank = dist.get_rank()
    source, own = Path(folder) / "model", Path(folder) / f"rank_{rank}" / "model"
    if rank == 0:
        FAMILIES["llama"].build().save_pretrained(source)
    dist.barrier()
    shutil.copytree(source, own)
    if changed and rank == 1:
        change_one_weight(own)
    os.utime(own / "model.safetensors", (1e9 + rank, 1e9 + rank))
    dist.barrier()
    return load_one(str(own), config)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda model: None,
    "in place on rank 1": lambda model: dist.get_rank() == 1 and model.lm_head.weight.mul_(2.0),
    "new tensor on every rank": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.clone()),
    "transposed": lambda model: setattr(
        model.lm_head.weight, "data", model.lm_head.weight.data.t().contiguous().t()
    ),
}  # fmt: skip


@torch.no_grad()
def change_and_shard(folder: str, config: dict[str, Any], name: str) -> dict[str, Any]:
    """Change a model before it is sharded. Returns the numbers of parameters read and broadcast, and the weights."""
    accelerator = fresh_accelerator(config)
    model = FAMILIES["llama"].model.from_pretrained(folder)
    CHANGES[name](model)
    own = clones(dict(model.named_parameters()))
    model = accelerator.prepare(model)
    record = getattr(model, BROADCAST_ATTRIBUTE)
    num_buffers = len(list(model.buffers()))
    return {
        "broadcast": record.num_tensors - num_buffers,
        "own": own,
        "weights": clones(accelerator.get_state_dict(model)),
    }


def overwrite_after_sharding(folder: str, config: dict[str, Any]) -> bool:
    """Overwrite and truncate the file after sharding. Returns whether the sharded weights are those of the file."""
    accelerator = fresh_accelerator(config)
    model = FAMILIES["llama"].model.from_pretrained(folder)
    expected = clones(dict(model.named_parameters()))
    model = accelerator.prepare(model)
    dist.barrier()
    if dist.get_rank() == 0:
        path = Path(folder) / "model.safetensors"
        with path.open("r+b") as file:
            file.write(b"\0" * path.stat().st_size)
        os.truncate(path, 0)
    dist.barrier()
    found = clones(accelerator.get_state_dict(model))
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items()) if found else True


def load_sharded(folder: str, config: dict[str, Any], *, with_plan: bool) -> dict[str, Any]:
    """Load with ``hfp.from_pretrained``, train by hand and with an Accelerator, and report."""
    accelerator = fresh_accelerator(config)
    spec = hfp.load_spec(config)
    target: Any = spec
    if with_plan:
        whole = FAMILIES["llama"].build()
        target = hfp.resolve(spec, whole, world_size=dist.get_world_size(), device_type=own_device().type)
    before = {name: os.environ.get(name) for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")}
    model = hfp.from_pretrained(folder, target)
    assert before == {name: os.environ.get(name) for name in before}
    record = getattr(model, BROADCAST_ATTRIBUTE)
    same, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    weights = clones(accelerator.get_state_dict(model))
    batch = FAMILIES["llama"].batch(0)
    first = model(**batch).loss
    accelerator.backward(first)
    optimizer.step()
    return {
        "is_same": same is model,
        "from_files": record.num_from_files,
        "weights": weights,
        "falls": model(**batch).loss.item() < first.item(),
        "statuses": {row["setting"]: row["status"] for row in hfp.report(accelerator).to_json()["settings"]},
    }


def load_without_fsdp(folder: str) -> list[str]:
    try:
        hfp.from_pretrained(folder, hfp.load_spec({"distributed_type": "NO"}))
    except hfp.SpecError as error:
        return [problem.code for problem in error.problems]
    return []
