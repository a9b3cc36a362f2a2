"""Precision, devices, activation checkpointing, and the settings that FSDP2 has no counterpart for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_families import on_meta
from torch import nn

from hf_fsdp_plugin.plan.model import FsdpPlan, PrecisionPlan
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import Origin, SpecError
from hf_fsdp_plugin.spec.model import (
    ActivationSection,
    FsdpSection,
    FsdpSpec,
    OffloadSection,
    ParamsSection,
    PrecisionSection,
    PrefetchSection,
    ShardingSection,
    WrapSection,
)

LAYERS = WrapSection(policy="transformer")


def planned(model: nn.Module | None = None, *, device_type: Any = "cpu", **sections: Any) -> FsdpPlan:
    spec = FsdpSpec(**{"wrap": LAYERS, **sections})
    return resolve(spec, model or on_meta("llama"), world_size=2, device_type=device_type)


def test_without_mixed_precision_nothing_is_cast() -> None:
    plan = planned()
    assert plan.precision == PrecisionPlan(
        param="unchanged", reduce="fp32", output="unchanged", buffer="unchanged", master="unchanged"
    )
    assert plan.problems == ()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_mixed_precision_keeps_master_weights_and_reduction_in_fp32(dtype: Any) -> None:
    precision = planned(precision=PrecisionSection(param=dtype), device_type="cuda").precision
    assert (precision.param, precision.master, precision.reduce) == (dtype, "fp32", "fp32")


def test_every_dtype_is_passed_on_by_itself() -> None:
    asked = PrecisionSection(param="bf16", reduce="bf16", output="fp32", buffer="fp32")
    precision = planned(precision=asked).precision
    assert (precision.reduce, precision.output, precision.buffer) == ("bf16", "fp32", "fp32")


@pytest.mark.parametrize("field", ["param", "reduce", "output", "buffer"])
def test_fp16_on_cpu_is_an_error_and_on_cuda_is_not(field: str) -> None:
    section = PrecisionSection(**{field: "fp16"})
    with pytest.raises(SpecError, match=rf"precision\.{field}: fp16 is for accelerators"):
        planned(precision=section)
    planned(precision=section, device_type="cuda")


def test_a_bf16_model_without_mixed_precision_is_warned_about() -> None:
    model = on_meta("llama").to(torch.bfloat16)
    assert "master weights and optimizer state are bfloat16" in planned(model).problems[0].message
    assert planned(model, precision=PrecisionSection(param="bf16")).problems == ()


def test_plan_refuses_unsupported_device() -> None:
    with pytest.raises(SpecError) as refusal:
        planned(device_type="gpu")
    assert [problem.code for problem in refusal.value.problems] == ["FSDP-E301"]


def test_memory_is_pinned_for_an_accelerator_only() -> None:
    offload = OffloadSection(params=True, pin_memory=True)
    assert planned(offload=offload, device_type="cuda").pin_memory
    on_cpu = planned(offload=offload)
    assert not on_cpu.pin_memory
    assert on_cpu.offload_params
    assert [problem.severity for problem in on_cpu.problems] == ["note"]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("use_orig", [False, True])
def test_no_shard_with_offload_is_refused_only_where_version_1_could_not_save_it(version: Any, use_orig: bool) -> None:
    sections = {
        "fsdp": FsdpSection(version=version),
        "sharding": ShardingSection(strategy="no_shard"),
        "offload": OffloadSection(params=True),
        "params": ParamsSection(use_orig=use_orig),
    }
    if version == 1 and not use_orig:
        with pytest.raises(SpecError, match=r"offload_to_cpu=True and NO_SHARD.*Set fsdp_version: 2"):
            planned(**sections, device_type="cuda")
    else:
        assert planned(**sections, device_type="cuda").offload_params


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"])
def test_layers_are_freed_after_forward_under_the_full_strategies_only(strategy: Any) -> None:
    plan = planned(sharding=ShardingSection(strategy=strategy))
    freed = {unit.reshard_after_forward for unit in plan.units if unit.from_policy}
    assert freed == {strategy in ("full_shard", "hybrid_shard")}


def test_what_version_2_lacks_is_warned_about_where_it_was_asked() -> None:
    sections: dict[str, Any] = {
        "prefetch": PrefetchSection(limit_all_gathers=False),
        "params": ParamsSection(use_orig=False),
    }
    asked = {name: Origin(source="fsdp.yaml", line=1) for name in ("prefetch.limit_all_gathers", "params.use_orig")}
    plan = planned(**sections, origins=asked)
    assert [(p.severity, p.setting) for p in plan.problems] == [
        ("warning", "prefetch.limit_all_gathers"),
        ("warning", "params.use_orig"),
    ]
    assert plan.use_orig
    assert plan.prefetch.limit_all_gathers
    under_1 = planned(**sections, origins=asked, fsdp=FsdpSection(version=1))
    assert (under_1.problems, under_1.use_orig, under_1.prefetch.limit_all_gathers) == ((), False, False)


def test_checkpointing_needs_a_wrap_policy_unless_the_model_does_it_itself() -> None:
    with pytest.raises(SpecError, match="without a wrap policy there is no unit to checkpoint"):
        planned(wrap=WrapSection(), activation=ActivationSection(checkpointing="full"))
    assert planned(activation=ActivationSection(checkpointing="full", offload=True)).activation.offload
    assert planned(
        wrap=WrapSection(), activation=ActivationSection(checkpointing="full", native=True)
    ).activation.native


def test_both_kinds_of_checkpointing_are_an_error() -> None:
    model = on_meta("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(SpecError, match="has Transformers' gradient checkpointing enabled already"):
        planned(model, activation=ActivationSection(checkpointing="full"))
    planned(model, activation=ActivationSection(checkpointing="full", native=True))
    planned(model)


def test_layers_wrapped_for_checkpointing_already_are_an_error_with_checkpointing() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = on_meta("llama")
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    with pytest.raises(SpecError, match="are wrapped for checkpointing already"):
        planned(model, activation=ActivationSection(checkpointing="full"))
    planned(model)


def test_transformers_checkpointing_on_a_plain_module_is_an_error() -> None:
    with pytest.raises(SpecError, match="gradient_checkpointing is Transformers' own, and Linear has none"):
        planned(nn.Linear(2, 2), wrap=WrapSection(), activation=ActivationSection(checkpointing="full", native=True))
