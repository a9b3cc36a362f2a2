"""Every rank takes the weights from the mapped file. Only what differs between ranks is broadcast."""

from __future__ import annotations

import hashlib
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
from hf_fsdp_plugin.backends.loading.weight_loader import BroadcastRecord
from hf_fsdp_plugin.plan.names import unwrapped
from hf_fsdp_plugin.state import parts_of
from tests.support.families_runs import clones
from tests.support.loading_runs import save_plain
from tests.support.matrices import alternating, slow
from tests.support.model_families import FAMILIES
from tests.support.ranks import Ranks, own_device
from tests.support.tiny import parallel_config
from tests.support.training import fresh_accelerator

CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda model: None,
    "in place on rank 1": lambda model: dist.get_rank() == 1 and model.lm_head.weight.mul_(2.0),
    "new tensor on every rank": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.clone()),
    "transposed": lambda model: setattr(
        model.lm_head.weight, "data", model.lm_head.weight.data.t().contiguous().t()
    ),
}  # fmt: skip


both_versions = pytest.mark.parametrize("version", [1, 2])

NUM_PARAMETERS = 21
"""Of the small Llama with untied embeddings."""

PRIVATE = {"bert-mlm": 1}
"""Parameters that Transformers creates itself: a tied bias."""


def config(strategy: str = "full_shard", version: int = 2, world_size: int = 2, **more: Any) -> dict[str, Any]:
    more.setdefault("fsdp_cpu_ram_efficient_loading", True)
    return parallel_config(strategy, version, world_size, **more)


def save_and_read(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save a model on rank 0, and return the parameters and buffers of a model that one process loads."""
    if dist.get_rank() == 0:
        FAMILIES[family].build().save_pretrained(folder)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
        model = FAMILIES[family].model.from_pretrained(folder)
    return clones({**dict(model.named_parameters()), **dict(model.named_buffers())})


def load_families(folder: str, config: dict[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    """Load and shard each model. Returns what was taken from files, and the names of tensors that are not equal."""
    found = {}
    for name in names:
        path = Path(folder) / name
        expected = save_and_read(name, path)
        accelerator = fresh_accelerator(config)
        model = FAMILIES[name].model.from_pretrained(path)
        is_computed = any(parameter.is_meta for parameter in model.parameters())
        model = accelerator.prepare(model)
        record = parts_of(model).get(BroadcastRecord)
        loaded = {**clones(accelerator.get_state_dict(model)), **clones(dict(unwrapped(model).named_buffers()))}
        found[name] = {
            "is_computed": is_computed,
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


@both_versions
@pytest.mark.parametrize("part", [0, slow(1), slow(2)])
def test_all_architectures_equal_one_process(two_ranks: Ranks, tmp_path: Path, version: int, part: int) -> None:
    names = list(FAMILIES)[part::3]
    ranks = two_ranks.run(load_families, str(tmp_path), config(version=version), names)
    computed = [name for name in names if ranks[1][name]["is_computed"]]
    assert len(computed) < len(names)
    for rank in ranks:
        for name in names:
            found = rank[name]
            num_received = found["parameters"] if name in computed else PRIVATE.get(name, 0)
            assert found["different"] == [], name
            assert found["from_files"] == found["parameters"] - num_received, name
            assert found["broadcast"] == found["buffers"] + num_received, name


def save_in_bf16(folder: str) -> None:
    if dist.get_rank() == 0:
        FAMILIES["llama"].build().to(torch.bfloat16).save_pretrained(folder)
    dist.barrier()


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
    record = parts_of(model).get(BroadcastRecord)
    return {
        "from_files": record.num_from_files,
        "broadcast": record.num_tensors,
        "weights": weights,
        "local": {parameter.dtype for parameter in model.parameters()},
        "loading": [row for row in rows if row["setting"].startswith("loading.")][-1],
    }


@both_versions
@pytest.mark.parametrize("strategy", ["shard_grad_op", "no_shard"])
def test_nothing_is_broadcast_under_any_strategy(two_ranks: Ranks, tmp_path: Path, strategy: str, version: int) -> None:
    two_ranks.run(save_plain, "llama", str(tmp_path))
    check_loaded(two_ranks.run(load_one, str(tmp_path), config(strategy, version)))


@both_versions
def test_each_replica_of_a_hybrid_mesh_reads(four_ranks: Ranks, tmp_path: Path, version: int) -> None:
    four_ranks.run(save_plain, "llama", str(tmp_path))
    check_loaded(four_ranks.run(load_one, str(tmp_path), config("hybrid_shard", version, 4)))


def check_loaded(ranks: list[dict[str, Any]]) -> None:
    expected = dict(FAMILIES["llama"].build().state_dict())
    for rank in ranks:
        assert rank["from_files"] == NUM_PARAMETERS
        assert rank["loading"]["status"] == "applied"
        assert "took 21 parameters from the same files" in rank["loading"]["reason"]
    assert all(torch.equal(ranks[0]["weights"][name], tensor) for name, tensor in expected.items())


@both_versions
def test_offloaded_shards_are_read_too(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    two_ranks.run(save_plain, "llama", str(tmp_path))
    check_loaded(two_ranks.run(load_one, str(tmp_path), config(version=version, fsdp_offload_params=True)))


@both_versions
def test_masters_are_in_fp32(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    two_ranks.run(save_in_bf16, str(tmp_path))
    mixed = {**config(version=version, fsdp_ignored_modules="lm_head"), "mixed_precision": "bf16"}
    expected = FAMILIES["llama"].build().to(torch.bfloat16).state_dict()
    ranks = two_ranks.run(load_one, str(tmp_path), mixed, "bfloat16")
    assert all(rank["local"] == {torch.float32} and rank["from_files"] == NUM_PARAMETERS for rank in ranks)
    assert all(torch.equal(ranks[0]["weights"][name], tensor.float()) for name, tensor in expected.items())


@both_versions
@pytest.mark.parametrize("efficient", [True, False], ids=["efficient", "plain"])
def test_sync_module_states_broadcasts_only_what_may_differ(
    two_ranks: Ranks, tmp_path: Path, version: int, efficient: bool
) -> None:
    two_ranks.run(save_plain, "llama", str(tmp_path))
    settings = config(version=version, fsdp_cpu_ram_efficient_loading=efficient, fsdp_sync_module_states=True)
    check_loaded(two_ranks.run(load_one, str(tmp_path), settings))


@torch.no_grad()
def change_and_shard(folder: str, config: dict[str, Any], name: str) -> dict[str, Any]:
    """Change a model before it is sharded. Returns the numbers of parameters read and broadcast, and the weights."""
    accelerator = fresh_accelerator(config)
    model = FAMILIES["llama"].model.from_pretrained(folder)
    CHANGES[name](model)
    own = clones(dict(model.named_parameters()))
    model = accelerator.prepare(model)
    record = parts_of(model).get(BroadcastRecord)
    num_buffers = len(list(model.buffers()))
    return {
        "broadcast": record.num_tensors - num_buffers,
        "own": own,
        "weights": clones(accelerator.get_state_dict(model)),
    }


@pytest.mark.parametrize(("name", "version"), alternating(CHANGES))
def test_changed_weights_are_broadcast(two_ranks: Ranks, tmp_path: Path, version: int, name: str) -> None:
    two_ranks.run(save_plain, "llama", str(tmp_path))
    first, second = two_ranks.run(change_and_shard, str(tmp_path), config(version=version), name)
    assert first["broadcast"] == second["broadcast"] < NUM_PARAMETERS
    # A change in place counts for all parameters on the changed pages.
    assert first["broadcast"] >= 1 if name == "in place on rank 1" else first["broadcast"] == (name != "nothing")
    assert all(torch.equal(first["weights"][key], tensor) for key, tensor in first["own"].items())


def load_copies(folder: str, config: dict[str, Any], cached: bool) -> dict[str, Any]:
    """Each rank loads a copy of its own, as machines with their own disks do.

    Args:
        cached: whether the files are in a cache of the Hub, under the hash of their content.
    """
    rank = dist.get_rank()
    source, own = Path(folder) / "model", Path(folder) / f"rank_{rank}" / "model"
    if rank == 0:
        FAMILIES["llama"].build().save_pretrained(source)
    dist.barrier()
    shutil.copytree(source, own)
    weights = own / "model.safetensors"
    if cached:
        name = hashlib.sha256(weights.read_bytes()).hexdigest()
        weights = weights.rename(own / name)
        (own / "model.safetensors").symlink_to(name)
    os.utime(weights, (1e9 + rank, 1e9 + rank))
    dist.barrier()
    return load_one(str(own), config)


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
def test_copies_in_caches_are_read_by_each_rank(two_ranks: Ranks, tmp_path: Path, cached: bool) -> None:
    first, second = two_ranks.run(load_copies, str(tmp_path), config(), cached)
    assert first["from_files"] == second["from_files"] == (NUM_PARAMETERS if cached else 0)
    expected = FAMILIES["llama"].build().state_dict()
    assert all(torch.equal(first["weights"][name], tensor) for name, tensor in expected.items())


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


@both_versions
def test_shards_do_not_follow_the_file(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    two_ranks.run(save_plain, "llama", str(tmp_path))
    assert two_ranks.run(overwrite_after_sharding, str(tmp_path), config(version=version)) == [True, True]


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
    record = parts_of(model).get(BroadcastRecord)
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


@both_versions
@pytest.mark.parametrize("with_plan", [False, True], ids=["spec", "plan"])
def test_from_pretrained_returns_a_sharded_model(
    two_ranks: Ranks, tmp_path: Path, version: int, with_plan: bool
) -> None:
    two_ranks.run(save_plain, "llama", str(tmp_path))
    ranks = two_ranks.run(load_sharded, str(tmp_path), config(version=version), with_plan=with_plan)
    for rank in ranks:
        assert rank["is_same"] and rank["falls"] and rank["from_files"] == NUM_PARAMETERS
        assert rank["statuses"]["sharding.strategy"] == "applied" and "differs" not in rank["statuses"].values()
    expected = FAMILIES["llama"].build().state_dict()
    assert all(torch.equal(ranks[0]["weights"][name], tensor) for name, tensor in expected.items())


def load_without_fsdp(folder: str) -> list[str]:
    try:
        hfp.from_pretrained(folder, hfp.load_spec({"distributed_type": "NO"}))
    except hfp.SpecError as error:
        return [problem.code for problem in error.problems]
    return []


def test_from_pretrained_needs_fsdp(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(save_plain, "llama", str(tmp_path))
    assert two_ranks.run(load_without_fsdp, str(tmp_path)) == [["FSDP-E694"], ["FSDP-E694"]]
