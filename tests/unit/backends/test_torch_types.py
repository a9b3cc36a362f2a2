"""Dtypes and meshes of a plan."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hf_fsdp_plugin.backends.device_meshes import device_mesh
from hf_fsdp_plugin.backends.torch_types import dtensor_like
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, torch_dtype
from hf_fsdp_plugin.strategies import STRATEGIES


def test_unchanged_dtype_is_none():
    assert [torch_dtype(name) for name in ("fp32", "bf16", "fp16", "unchanged")] == [
        torch.float32, torch.bfloat16, torch.float16, None,
    ]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mesh_has_replicate_axis_where_needed(strategy: str, one_rank: None, plan_for: Callable[..., FsdpPlan]):
    plan = replace(plan_for(nn.Sequential(nn.Linear(2, 2))), strategy=strategy)
    names = device_mesh(plan).mesh_dim_names
    assert names == (("dp_shard",) if strategy in ("full_shard", "shard_grad_op") else ("dp_replicate", "dp_shard"))


def test_offloaded_shard_stays_on_its_device(one_rank: None):
    mesh = DeviceMesh("meta", [0])  # a mesh of another device than that of the shard, as with offload to the CPU
    other = DTensor.from_local(torch.empty(2, 3, device="meta"), mesh, [Shard(0)], run_check=False)
    local = torch.ones(2, 3, dtype=torch.bfloat16)
    made = dtensor_like(local, other)
    assert made.to_local().data_ptr() == local.data_ptr()
    assert (made.dtype, made.shape, made.device_mesh) == (torch.bfloat16, other.shape, mesh)
