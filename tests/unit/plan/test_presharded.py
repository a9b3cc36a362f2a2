"""Models that are sharded before they reach the plugin keep their units."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import Origin
from hf_fsdp_plugin.spec.model import FsdpSection, FsdpSpec, WrapSection


@pytest.fixture(autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    rendezvous = tmp_path_factory.mktemp("rendezvous") / "file"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stack() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))


def spec_of(version: int) -> FsdpSpec:
    return FsdpSpec(
        fsdp=FsdpSection(version=version),  # type: ignore[arg-type]
        wrap=WrapSection(policy="transformer", classes=("LlamaDecoderLayer",)),
        origins={"wrap.classes": Origin(source="fsdp.yaml", line=3)},
    )


def test_fully_sharded_model_keeps_its_units() -> None:
    model = stack()
    fully_shard([model[0], model[1]], reshard_after_forward=False)
    fully_shard(model)
    plan = resolve(spec_of(2), model, world_size=1)
    assert plan.pre_sharded
    assert plan.backend == "fsdp2"
    assert [(unit.name, unit.num_params, unit.reshard_after_forward) for unit in plan.units] == [
        ("0 + 1", 144, False),
        ("", 18, False),
    ]
    assert [unit.class_name for unit in plan.units] == ["Linear + Linear", "Sequential"]
    assert [(p.code, p.setting, p.origin) for p in plan.problems] == [
        ("FSDP-W251", "wrap.classes", Origin(source="fsdp.yaml", line=3))
    ]
    assert "already sharded" in str(plan).splitlines()[0]


@pytest.mark.parametrize("use_orig", [False, True])
def test_model_in_fsdp1_wrappers_keeps_its_units(use_orig: bool) -> None:
    model = stack()
    model[1] = FullyShardedDataParallel(model[1], device_id=torch.device("cpu"), use_orig_params=use_orig)
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=use_orig)
    plan = resolve(spec_of(1), wrapped, world_size=1)
    assert plan.pre_sharded
    assert plan.backend == "fsdp1"
    assert [(unit.num_params, unit.class_name) for unit in plan.units] == [(72, "Linear"), (90, "Sequential")]
    assert plan.units[0].name.endswith("1")
    assert plan.units[1].name == ""


def test_sharded_model_overrides_the_version() -> None:
    model = fully_shard(stack())
    plan = resolve(spec_of(1), model, world_size=1)
    assert plan.backend == "fsdp2"
    assert [(problem.code, problem.setting) for problem in plan.problems] == [
        ("FSDP-W250", "fsdp.version"),
        ("FSDP-W251", "wrap.classes"),
    ]


def test_model_of_dtensors_counts_as_sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    model = distribute_module(stack(), init_device_mesh("cpu", (1,)))
    plan = resolve(spec_of(2), model, world_size=1)
    assert plan.pre_sharded
    assert [(unit.name, unit.num_params) for unit in plan.units] == [("", 162)]


def test_model_without_fsdp_is_not_sharded() -> None:
    spec = FsdpSpec(wrap=WrapSection(policy="transformer", classes=("Linear",)))
    assert not resolve(spec, stack(), world_size=1).pre_sharded
