"""Collectives of small plans, computed by hand. tests/gloo/test_communication.py compares them with real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.padding import padded_shape
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.tools.plan.estimate.time import estimate_communication
from hf_fsdp_plugin.tools.plan.estimate.types import Collective, Workload
from hf_fsdp_plugin.tools.plan.estimate.unit_bytes import flat_starts

STEP = Workload(micro_batch=1, seq_len=8)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 6)


class Model(nn.Module):
    """Two layers of 36 parameters and a root with 7."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.scale = nn.Parameter(torch.ones(7))


def plan_for(model: nn.Module, version: int, strategy: str = "full_shard", world: int = 4, **settings: Any) -> FsdpPlan:
    config = {
        "distributed_type": "FSDP", "num_processes": world, "use_cpu": True,
        **settings.pop("config", {}),
        "fsdp_config": {
            "fsdp_version": version, "fsdp_sharding_strategy": strategy.upper(), "fsdp_use_orig_params": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "Layer",
            **settings,
        },
    }  # fmt: skip
    return resolve(load_spec(config, environ={}), model, world_size=world)


def calls_of(plan: FsdpPlan, model: nn.Module, workload: Workload = STEP) -> dict[tuple[str, str, int], int]:
    found: dict[tuple[str, str, int], int] = {}
    for call in estimate_communication(plan, model, workload):
        key = (call.kind, call.axis, call.bytes)
        found[key] = found.get(key, 0) + call.calls
    return found


def bytes_of(kind: str, calls: list[Collective]) -> int:
    return sum(call.bytes * call.calls for call in calls if call.kind == kind)


def test_fsdp2_pads_each_parameter() -> None:
    # Weight 6 x 5 padded to 8 x 5, bias 6 padded to 8: 48 elements; the root's 7 padded to 8.
    assert calls_of(plan_for(Model(), 2), Model()) == {
        ("all_gather", "shard", 192): 4,
        ("all_gather", "shard", 32): 1,
        ("reduce_scatter", "shard", 192): 2,
        ("reduce_scatter", "shard", 32): 1,
        ("all_reduce", "world", 5): 1,  # a byte for each parameter: whether any rank has used it
        ("all_reduce", "shard", 4): 1,
    }


def test_fsdp1_pads_the_flat_parameter() -> None:
    # 30 weights aligned to 32 (16 bytes), 6 biases: 38, padded to 40; the root's 7 padded to 8.
    assert calls_of(plan_for(Model(), 1), Model()) == {
        ("all_gather", "shard", 160): 4,
        ("all_gather", "shard", 32): 1,
        ("reduce_scatter", "shard", 160): 2,
        ("reduce_scatter", "shard", 32): 1,
        ("all_reduce", "world", 5): 1,  # a byte for each parameter: whether any rank has used it
        ("all_reduce", "shard", 4): 1,
    }


def test_bf16_halves_gathers_and_keeps_fp32_reductions() -> None:
    found = calls_of(plan_for(Model(), 2, config={"mixed_precision": "bf16"}), Model())
    assert found["all_gather", "shard", 96] == 4
    assert found["reduce_scatter", "shard", 192] == 2


@pytest.mark.parametrize(("sync", "reductions"), [(False, 1), (True, 3)])
def test_accumulation_without_sync_reduces_once(sync: bool, reductions: int) -> None:
    workload = Workload(micro_batch=1, seq_len=8, accumulation=3, sync_each_batch=sync)
    found = calls_of(plan_for(Model(), 2), Model(), workload)
    assert found["all_gather", "shard", 192] == 12
    assert found["reduce_scatter", "shard", 192] == 2 * reductions


@pytest.mark.parametrize(("version", "sync", "gathers"), [(1, False, 2), (1, True, 6), (2, False, 6), (2, True, 6)])
def test_fsdp1_keeps_shard_grad_op_gathered_without_sync(version: int, sync: bool, gathers: int) -> None:
    workload = Workload(micro_batch=1, seq_len=8, accumulation=3, sync_each_batch=sync)
    found = calls_of(plan_for(Model(), version, "shard_grad_op"), Model(), workload)
    assert found["all_gather", "shard", 192 if version == 2 else 160] == gathers


def test_hybrid_reduces_shards_over_replicas() -> None:
    mesh = {"parallelism_config": {"parallelism_config_dp_shard_size": 2, "parallelism_config_dp_replicate_size": 2}}
    found = calls_of(plan_for(Model(), 2, "hybrid_shard", config=mesh), Model())
    assert found["reduce_scatter", "shard", 144] == 2
    assert found["all_reduce", "replicate", 72] == 2


@pytest.mark.parametrize("version", [1, 2])
def test_no_shard_only_reduces(version: int) -> None:
    calls = list(estimate_communication(plan_for(Model(), version, "no_shard"), Model(), STEP))
    assert {call.kind for call in calls} == {"all_reduce"} and bytes_of("all_reduce", calls) >= 4 * (36 + 36 + 7)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.sampled_from([1, 4, 8]))
def test_flat_parameter_grows_by_padding_only(numels: list[int], aligned: int) -> None:
    starts, total = flat_starts(numels, aligned)
    assert sum(numels) <= total <= sum(numels) + (aligned - 1) * len(numels)
    assert not any(start % aligned for start in starts)
    ends = [start + numel for start, numel in zip(starts, numels, strict=True)]
    assert all(end <= start for end, start in zip(ends, [*starts[1:], total], strict=True))


@pytest.mark.parametrize("use_orig", [True, False])
def test_flat_parameters_are_divisible_by_the_ranks(use_orig: bool) -> None:
    found = calls_of(plan_for(Model(), 1, world=7, fsdp_use_orig_params=use_orig), Model())
    assert all(size % (7 * 4) == 0 for kind, axis, size in found if kind != "all_reduce")


def test_fsdp1_without_sharding_pads_for_all_ranks() -> None:
    # 38 elements with aligned biases, and the root's 7, padded to multiples of 4.
    found = calls_of(plan_for(Model(), 1, "no_shard"), Model())
    assert found["all_reduce", "replicate", 40 * 4] == 2 and found["all_reduce", "replicate", 8 * 4] == 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 64))
def test_padded_parameter_is_divisible(shape: list[int], shards: int) -> None:
    rows, *rest = padded_shape(shape, shards)
    assert rows % shards == 0
    assert 0 <= rows - shape[0] < shards and rest == shape[1:]


@given(st.sampled_from([1, 2]), st.sampled_from(["full_shard", "shard_grad_op"]), st.integers(2, 12))
def test_bytes_do_not_grow_with_world_beyond_padding(version: int, strategy: str, power: int) -> None:
    model = nn.Sequential(Layer(), Layer()).to("meta")
    few, many = (
        list(estimate_communication(plan_for(model, version, strategy, world), model, STEP)) for world in (2, 2**power)
    )
    assert sum(call.calls for call in few) == sum(call.calls for call in many)
    padding = 4 * 2 * (2**power) * (5 + 1)
    assert bytes_of("reduce_scatter", many) <= bytes_of("reduce_scatter", few) + padding
