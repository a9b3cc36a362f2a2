"""Planned units are the units that Accelerate and torch create for the same model, on one rank."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.units import sharded_units
from tests.support.model_families import FAMILIES
from tests.unit.plan.plans import planned, wrapping

pytestmark = pytest.mark.usefixtures("one_rank")

# Accelerate's units contain a scalar (clip), or share a parameter, which torch >= 2.13 refuses at the first step.
REFUSED_BY_TORCH = {"clip", "bert-mlm", "t5", "bart"}


def prepared_by_accelerate(model: nn.Module, classes: tuple[str, ...]) -> nn.Module:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=list(classes),
        cpu_ram_efficient_loading=False,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="no",
        torch_device_mesh=None,
        is_main_process=True,
        device=torch.device("cpu"),
    )
    return fsdp2_prepare_model(accelerator, model)


def apply(plan: FsdpPlan, model: nn.Module) -> nn.Module:
    for unit in plan.units:
        modules = [model.get_submodule(name) for name in unit.modules]
        fully_shard(modules if len(modules) > 1 else modules[0], reshard_after_forward=unit.reshard_after_forward)
    return model


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - REFUSED_BY_TORCH))
def test_fsdp2_units_match_accelerate(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # Accelerate's plugin writes this variable
    classes = FAMILIES[family].layers
    model = FAMILIES[family].build()
    plan = planned(wrapping(*classes), model, world_size=1)
    stock = sharded_units(prepared_by_accelerate(model, classes), "fsdp2")
    assert {(frozenset(unit.modules), unit.num_params, unit.reshard_after_forward) for unit in plan.units} == {
        (frozenset(unit.modules), unit.num_params, unit.reshard_after_forward) for unit in stock
    }


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"clip"}))
@pytest.mark.parametrize("own_classes", [False, True], ids=["recommended", "own"])
def test_planned_units_train_like_the_unsharded_model(family: str, own_classes: bool) -> None:
    loss_of, batch = FAMILIES[family].loss, FAMILIES[family].batch(0)
    model = FAMILIES[family].build()
    expected = loss_of(model, batch)
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    classes = () if own_classes else FAMILIES[family].layers
    sharded = apply(planned(wrapping(*classes), model, world_size=1), model)
    for step in (1, 2):
        loss = loss_of(sharded, batch)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        for name, parameter in sharded.named_parameters():
            if name in gradients:
                torch.testing.assert_close(parameter.grad.full_tensor(), step * gradients[name])


@pytest.mark.parametrize("threshold", [1_000, 5_000, 9_000])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "vit"])
def test_size_policy_selects_same_modules_as_torch(family: str, threshold: int) -> None:
    model = FAMILIES[family].build()
    if family == "gpt2":  # without the tie, which FSDP1 would break
        model.lm_head = nn.Linear(32, 96, bias=False)
    plan = planned(wrapping(version=1, policy="size", min_num_params=threshold), model, world_size=1)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=threshold)
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    assert {unit.name for unit in sharded_units(wrapped, "fsdp1")} == {unit.name for unit in plan.units}
