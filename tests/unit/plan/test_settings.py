"""Precision, offload, activation checkpointing, and the settings that FSDP2 does not support."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import _ATTRIBUTES, _SECTIONS, FsdpPlan, PrecisionPlan
from hf_fsdp_plugin.problems import Origin, Problem
from hf_fsdp_plugin.spec.fsdp_spec import (
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
from hf_fsdp_plugin.strategies import STRATEGIES
from tests.support.model_families import on_meta
from tests.unit.plan.plans import planned, problem_in, refused, wrapping

FULL = ActivationSection(checkpointing="full")
NATIVE = ActivationSection(checkpointing="full", native=True)


def plan_of(model: nn.Module | None = None, *, device_type: str = "cpu", **sections: Any) -> FsdpPlan:
    return planned(replace(wrapping(), **sections), model or on_meta("llama"), device_type=device_type)


def refusal(code: str, model: nn.Module | None = None, *, device_type: str = "cpu", **sections: Any) -> Problem:
    return refused(code, replace(wrapping(), **sections), model or on_meta("llama"), device_type=device_type)


def test_nothing_is_cast_without_mixed_precision() -> None:
    plan = plan_of()
    assert plan.precision == PrecisionPlan(
        param="unchanged", reduce="fp32", output="unchanged", buffer="unchanged", master="unchanged"
    )
    assert plan.problems == ()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_mixed_precision_keeps_master_and_reduction_in_fp32(dtype: Any) -> None:
    precision = plan_of(precision=PrecisionSection(param=dtype), device_type="cuda").precision
    assert (precision.param, precision.master, precision.reduce) == (dtype, "fp32", "fp32")


def test_each_dtype_is_resolved_separately() -> None:
    asked = PrecisionSection(param="bf16", reduce="bf16", output="fp32", buffer="fp32")
    precision = plan_of(precision=asked).precision
    assert (precision.reduce, precision.output, precision.buffer) == ("bf16", "fp32", "fp32")


@pytest.mark.parametrize("field", ["param", "reduce", "output", "buffer"])
def test_fp16_is_refused_on_cpu_only(field: str) -> None:
    section = PrecisionSection(**{field: "fp16"})
    assert refusal("FSDP-E147", precision=section).setting == f"precision.{field}"
    plan_of(precision=section, device_type="cuda")


def test_bf16_model_without_mixed_precision_is_a_warning() -> None:
    model = on_meta("llama").to(torch.bfloat16)
    assert "bfloat16" in problem_in(plan_of(model).problems, "FSDP-W231").message
    assert plan_of(model, precision=PrecisionSection(param="bf16")).problems == ()


def test_plan_refuses_unsupported_device() -> None:
    assert "'gpu'" in refusal("FSDP-E301", device_type="gpu").message


def test_memory_is_pinned_for_accelerators_only() -> None:
    offload = OffloadSection(params=True, pin_memory=True)
    assert plan_of(offload=offload, device_type="cuda").pin_memory
    on_cpu = plan_of(offload=offload)
    assert not on_cpu.pin_memory
    assert on_cpu.offload_params


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_full_strategies_free_layers_after_forward(strategy: str) -> None:
    plan = plan_of(sharding=ShardingSection(strategy=strategy))
    freed = {unit.reshard_after_forward for unit in plan.units if unit.from_policy}
    assert freed == {strategy in ("full_shard", "hybrid_shard")}


def test_settings_without_fsdp2_support_are_a_warning() -> None:
    sections: dict[str, Any] = {
        "prefetch": PrefetchSection(limit_all_gathers=False),
        "params": ParamsSection(use_orig=False),
    }
    asked = {name: Origin(source="fsdp.yaml", line=1) for name in ("prefetch.limit_all_gathers", "params.use_orig")}
    plan = plan_of(**sections, origins=asked)
    assert [(p.severity, p.setting) for p in plan.problems] == [
        ("warning", "prefetch.limit_all_gathers"),
        ("warning", "params.use_orig"),
    ]
    assert plan.use_orig
    assert plan.prefetch.limit_all_gathers
    under_1 = plan_of(**sections, origins=asked, fsdp=FsdpSection(version=1))
    assert (under_1.problems, under_1.use_orig, under_1.prefetch.limit_all_gathers) == ((), False, False)


def test_checkpointing_needs_a_wrap_policy_unless_native() -> None:
    refusal("FSDP-E241", wrap=WrapSection(), activation=FULL)
    assert plan_of(wrap=WrapSection(), activation=NATIVE).activation.native
    assert plan_of(activation=replace(FULL, offload=True)).activation.offload


def test_reentrant_checkpointing_in_units_of_fsdp1_is_refused() -> None:
    model = on_meta("llama")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    version, one_unit = FsdpSection(version=1), WrapSection(policy="none")
    inner = WrapSection(policy="transformer", classes=("LlamaMLP",))
    for wrap in (one_unit, inner):
        assert "model.layers.0" in refusal("FSDP-E225", model, fsdp=version, wrap=wrap).message
    unsharded = ShardingSection(strategy="no_shard")
    for sections in ({"fsdp": version}, {"wrap": one_unit}, {"fsdp": version, "wrap": one_unit, "sharding": unsharded}):
        plan_of(model, **sections)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    plan_of(model, fsdp=version, wrap=one_unit)


def test_plan_copies_only_listed_settings_from_the_spec() -> None:
    resolved = {*_ATTRIBUTES, *(name for name, _, _ in FsdpSpec().settings() if name.partition(".")[0] in _SECTIONS)}
    copied = {name for name, _, _ in FsdpSpec().settings()} - resolved
    assert {name for name in copied if not name.startswith(("launch.", "xla.", "fp8."))} == {
        "sharding.reduce_replicas_at_last_micro_batch",
        "wrap.policy",
        "wrap.classes",
        "wrap.min_num_params",
        "wrap.ignored_modules",
        "checkpoint.asynchronous",
        "checkpoint.save_on_signal",
        "checkpoint.storage",
        "checkpoint.verify",
        "metrics.log",
        "metrics.straggler_percent",
    }
