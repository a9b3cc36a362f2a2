"""Models that are sharded before they reach the plugin keep their units."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.problems import Origin
from tests.unit.plan.plans import planned, wrapping

pytestmark = pytest.mark.usefixtures("one_rank")
ORIGIN = Origin(source="fsdp.yaml", line=3)


def stack() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))


def plan_of(model: nn.Module, version: int = 2) -> FsdpPlan:
    spec = replace(wrapping("LlamaDecoderLayer", version=version), origins={"wrap.classes": ORIGIN})
    return planned(spec, model, world_size=1)


def test_fully_sharded_model_keeps_its_units() -> None:
    model = stack()
    fully_shard([model[0], model[1]], reshard_after_forward=False)
    fully_shard(model)
    plan = plan_of(model)
    assert (plan.pre_sharded, plan.backend) == (True, "fsdp2")
    assert [(unit.name, unit.num_params, unit.reshard_after_forward) for unit in plan.units] == [
        ("0 + 1", 144, False),
        ("", 18, False),
    ]
    assert [unit.class_name for unit in plan.units] == ["Linear + Linear", "Sequential"]
    assert [(p.code, p.setting, p.origin) for p in plan.problems] == [("FSDP-W251", "wrap.classes", ORIGIN)]
    assert "already sharded" in str(plan).splitlines()[0]


@pytest.mark.parametrize("use_orig", [False, True])
def test_model_in_fsdp1_wrappers_keeps_its_units(use_orig: bool) -> None:
    model = stack()
    model[1] = FullyShardedDataParallel(model[1], device_id=torch.device("cpu"), use_orig_params=use_orig)
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig)
    plan = plan_of(wrapped, version=1)
    assert (plan.pre_sharded, plan.backend) == (True, "fsdp1")
    assert [(unit.name, unit.class_name, unit.num_params) for unit in plan.units] == [
        ("1", "Linear", 72),
        ("", "Sequential", 90),
    ]


def test_sharded_model_overrides_the_version() -> None:
    plan = plan_of(fully_shard(stack()), version=1)
    assert plan.backend == "fsdp2"
    assert [(problem.code, problem.setting) for problem in plan.problems] == [
        ("FSDP-W250", "fsdp.version"),
        ("FSDP-W251", "wrap.classes"),
    ]


def test_model_of_dtensors_counts_as_sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    plan = plan_of(distribute_module(stack(), init_device_mesh("cpu", (1,))))
    assert plan.pre_sharded
    assert [(unit.name, unit.num_params) for unit in plan.units] == [("", 162)]
    [problem] = plan.problems
    assert problem.code == "FSDP-W251" and "FSDP is not applied" in problem.message
    assert "fully_shard" not in problem.message and "tp_plan" in problem.fix


def test_model_without_fsdp_is_not_sharded() -> None:
    assert not planned(wrapping("Linear"), stack(), world_size=1).pre_sharded
