"""Planned units are the units that Accelerate and torch create for the same model, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from model_families import FAMILIES, wrapping
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from hf_fsdp_plugin.plan.model import FsdpPlan
from hf_fsdp_plugin.plan.presharded import sharded_units
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.spec.model import FsdpSection, FsdpSpec, WrapSection

# A parameter in two FSDP groups: Accelerate creates such units, and torch >= 2.13 refuses them at the first step.
REFUSED_BY_TORCH = {"bert-mlm", "t5", "bart"}


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    rendezvous: Path = tmp_path_factory.mktemp("rendezvous") / "file"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - REFUSED_BY_TORCH))
def test_fsdp2_units_are_accelerates(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # Accelerate's plugin writes this variable
    classes = FAMILIES[family].layers
    model = fresh(family)
    plan = resolve(wrapping(*classes), model, world_size=1)
    stock = sharded_units(prepared_by_accelerate(model, classes), "fsdp2")
    assert {(frozenset(unit.modules), unit.num_params, unit.reshard_after_forward) for unit in plan.units} == {
        (frozenset(unit.modules), unit.num_params, unit.reshard_after_forward) for unit in stock
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("own_classes", [False, True], ids=["recommended", "own"])
def test_planned_units_train_like_the_unsharded_model(family: str, own_classes: bool) -> None:
    torch.manual_seed(0)
    classes = () if own_classes else FAMILIES[family].layers
    inputs = FAMILIES[family].inputs()
    model = FAMILIES[family].build().eval()
    expected = first_value(model(**inputs))
    expected.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    sharded = apply(resolve(wrapping(*classes), model, world_size=1), model)
    for step in (1, 2):
        value = first_value(sharded(**inputs))
        torch.testing.assert_close(value, expected)
        value.sum().backward()
        for name, parameter in sharded.named_parameters():
            if name in gradients:
                torch.testing.assert_close(parameter.grad.full_tensor(), step * gradients[name])


def fresh(family: str) -> nn.Module:
    return FAMILIES[family].build()


def first_value(output: object) -> torch.Tensor:
    return output.loss if getattr(output, "loss", None) is not None else output[0]  # type: ignore[index,attr-defined]


@pytest.mark.parametrize("threshold", [1_000, 5_000, 9_000])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "vit"])
def test_size_policy_selects_torchs_modules(family: str, threshold: int) -> None:
    import functools

    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    torch.manual_seed(0)
    spec = FsdpSpec(fsdp=FsdpSection(version=1), wrap=WrapSection(policy="size", min_num_params=threshold))
    model = FAMILIES[family].build()
    if family == "gpt2":  # without the tie, which FSDP1 would break
        model.lm_head = nn.Linear(32, 96, bias=False)
    plan = resolve(spec, model, world_size=1)
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=threshold)
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    made = {unit.name.replace("_fsdp_wrapped_module.", "") for unit in sharded_units(wrapped, "fsdp1")}
    assert made == {unit.name for unit in plan.units}
