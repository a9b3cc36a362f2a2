"""Every rank takes its shards from the mapped file. Only what differs between ranks is broadcast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo import cases_loading
from tests.gloo import cases_shard_on_read as cases
from tests.support.matrices import alternating, slow
from tests.support.model_families import FAMILIES
from tests.support.ranks import Ranks
from tests.support.tiny import parallel_config

both_versions = pytest.mark.parametrize("version", [1, 2])
NUM_PARAMETERS = 21
"""Of the small Llama with untied embeddings."""
PRIVATE = {"bert-mlm": 1}
"""Parameters that Transformers creates itself: a tied bias."""


def config(strategy: str = "full_shard", version: int = 2, world_size: int = 2, **more: Any) -> dict[str, Any]:
    more.setdefault("fsdp_cpu_ram_efficient_loading", True)
    return parallel_config(strategy, version, world_size, **more)


@both_versions
@pytest.mark.parametrize("part", [0, slow(1), slow(2)])
def test_all_architectures_equal_one_process(two_ranks: Ranks, tmp_path: Path, version: int, part: int) -> None:
    names = list(FAMILIES)[part::3]
    for rank in two_ranks.run(cases.load_families, str(tmp_path), config(version=version), names):
        for name in names:
            found = rank[name]
            assert found["different"] == [], name
            assert found["from_files"] == found["parameters"] - PRIVATE.get(name, 0), name
            assert found["broadcast"] == found["buffers"] + PRIVATE.get(name, 0), name


@both_versions
@pytest.mark.parametrize("strategy", ["shard_grad_op", "no_shard"])
def test_nothing_is_broadcast_under_any_strategy(two_ranks: Ranks, tmp_path: Path, strategy: str, version: int) -> None:
    two_ranks.run(cases_loading.save_plain, "llama", str(tmp_path))
    check_loaded(two_ranks.run(cases.load_one, str(tmp_path), config(strategy, version)))


@both_versions
def test_each_replica_of_a_hybrid_mesh_reads(four_ranks: Ranks, tmp_path: Path, version: int) -> None:
    four_ranks.run(cases_loading.save_plain, "llama", str(tmp_path))
    check_loaded(four_ranks.run(cases.load_one, str(tmp_path), config("hybrid_shard", version, 4)))


def check_loaded(ranks: list[dict[str, Any]]) -> None:
    expected = dict(FAMILIES["llama"].build().state_dict())
    for rank in ranks:
        assert rank["from_files"] == NUM_PARAMETERS
        assert rank["loading"]["status"] == "applied"
        assert "took 21 parameters from the same files" in rank["loading"]["reason"]
    assert all(torch.equal(ranks[0]["weights"][name], tensor) for name, tensor in expected.items())


@both_versions
def test_offloaded_shards_are_read_too(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    two_ranks.run(cases_loading.save_plain, "llama", str(tmp_path))
    check_loaded(two_ranks.run(cases.load_one, str(tmp_path), config(version=version, fsdp_offload_params=True)))


@both_versions
@pytest.mark.parametrize("use_orig", [True, False], ids=["orig", "flat"])
def test_each_rank_reads_its_shards_only(two_ranks: Ranks, tmp_path: Path, version: int, use_orig: bool) -> None:
    two_ranks.run(cases_loading.save_plain, "llama", str(tmp_path))
    settings = config(version=version, fsdp_use_orig_params=use_orig) if version == 1 else config()
    ranks = two_ranks.run(cases.count_read_bytes, str(tmp_path), settings)
    for rank in ranks:
        assert rank["shards"] * 0.95 <= rank["read"] <= rank["shards"]  # shards of FSDP1 have padding
    whole = sum(tensor.nbytes for tensor in FAMILIES["llama"].build().parameters())
    assert sum(rank["read"] for rank in ranks) == whole


@both_versions
def test_masters_are_cast_shard_by_shard(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    two_ranks.run(cases_loading.save_plain, "llama", str(tmp_path))
    mixed = {**config(version=version, fsdp_ignored_modules="lm_head"), "mixed_precision": "bf16"}
    expected = FAMILIES["llama"].build().to(torch.bfloat16).state_dict()
    ranks = two_ranks.run(cases.load_one, str(tmp_path), mixed, "bfloat16")
    assert all(rank["local"] == {torch.float32} and rank["from_files"] == NUM_PARAMETERS for rank in ranks)
    assert all(torch.equal(ranks[0]["weights"][name], tensor.float()) for name, tensor in expected.items())


@both_versions
@pytest.mark.parametrize("efficient", [True, False], ids=["efficient", "plain"])
def test_sync_module_states_broadcasts_only_what_may_differ(
    two_ranks: Ranks, tmp_path: Path, version: int, efficient: bool
) -> None:
    two_ranks.run(cases_loading.save_plain, "llama", str(tmp_path))
    settings = config(version=version, fsdp_cpu_ram_efficient_loading=efficient, fsdp_sync_module_states=True)
    check_loaded(two_ranks.run(cases.load_one, str(tmp_path), settings))


@pytest.mark.parametrize(("name", "version"), alternating(cases.CHANGES))
def test_changed_weights_are_broadcast(two_ranks: Ranks, tmp_path: Path, version: int, name: str) -> None:
    two_ranks.run(cases_loading.save_plain, "llama", str(tmp_path))
    first, second = two_ranks.run(cases.change_and_shard, str(tmp_path), config(version=version), name)
    # A change in place counts for the whole file.
    expected = {"nothing": 0, "in place on rank 1": NUM_PARAMETERS}.get(name, 1)
    assert first["broadcast"] == second["broadcast"] == expected
    assert all(torch.equal(first["weights"][key], tensor) for key, tensor in first["own"].items())


@pytest.mark.parametrize("changed", [False, True], ids=["equal", "one-differs"])
def test_copies_of_a_file_are_compared_by_content(two_ranks: Ranks, tmp_path: Path, changed: bool) -> None:
    first, second = two_ranks.run(cases.load_copies, str(tmp_path), config(), changed)
    assert first["from_files"] == second["from_files"] == NUM_PARAMETERS - changed
    expected = FAMILIES["llama"].build().state_dict()
    assert all(torch.equal(first["weights"][name], tensor) for name, tensor in expected.items())


@both_versions
def test_shards_do_not_follow_the_file(two_ranks: Ranks, tmp_path: Path, version: int) -> None:
    two_ranks.run(cases_loading.save_plain, "llama", str(tmp_path))
    assert two_ranks.run(cases.overwrite_after_sharding, str(tmp_path), config(version=version)) == [True, True]


@both_versions
@pytest.mark.parametrize("with_plan", [False, True], ids=["spec", "plan"])
def test_from_pretrained_returns_a_sharded_model(
    two_ranks: Ranks, tmp_path: Path, version: int, with_plan: bool
) -> None:
    two_ranks.run(cases_loading.save_plain, "llama", str(tmp_path))
    ranks = two_ranks.run(cases.load_sharded, str(tmp_path), config(version=version), with_plan=with_plan)
    for rank in ranks:
        assert rank["is_same"] and rank["falls"] and rank["from_files"] == NUM_PARAMETERS
        assert rank["statuses"]["sharding.strategy"] == "applied" and "differs" not in rank["statuses"].values()
    expected = FAMILIES["llama"].build().state_dict()
    assert all(torch.equal(ranks[0]["weights"][name], tensor) for name, tensor in expected.items())


def test_from_pretrained_needs_fsdp(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(cases_loading.save_plain, "llama", str(tmp_path))
    assert two_ranks.run(cases.load_without_fsdp, str(tmp_path)) == [["FSDP-E694"], ["FSDP-E694"]]
