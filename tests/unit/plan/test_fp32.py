"""Modules that compute in fp32 in mixed precision: which ones the plan selects, and where it refuses them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hf_fsdp_plugin.plan import resolve
from hf_fsdp_plugin.spec.fsdp_spec import FsdpSpec
from hf_fsdp_plugin.tools.plan.estimate.unit_bytes import unit_bytes
from tests.support.model_families import on_meta
from tests.unit.plan.plans import planned, refused, wrapping


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "is_since_2_15", lambda: True)


def spec_of(pattern: str, version: Any = 2, param: Any = "bf16") -> FsdpSpec:
    spec = wrapping(version=version, param=param)
    return replace(spec, precision=replace(spec.precision, fp32_modules=pattern))


@pytest.mark.usefixtures("newest")
def test_pattern_selects_modules_and_parameters() -> None:
    plan = planned(spec_of(r".*layernorm|model\.norm"), on_meta("llama"))
    layers = [f"model.layers.{i}.{name}_layernorm" for i in (0, 1) for name in ("input", "post_attention")]
    assert plan.fp32_modules == (*layers, "model.norm")
    assert sorted(plan.fp32_parameters) == sorted(f"{name}.weight" for name in plan.fp32_modules)
    assert plan.to_json()["fp32_modules"] == list(plan.fp32_modules)
    assert "modules in fp32: 5" in str(plan)


@pytest.mark.usefixtures("newest")
def test_only_outermost_modules_are_cast() -> None:
    plan = planned(spec_of(r"model\.layers\.0(\..*)?"), on_meta("llama"))
    assert plan.fp32_modules == ("model.layers.0",)
    assert len(plan.fp32_parameters) == 9


@pytest.mark.usefixtures("newest")
def test_module_with_a_tied_weight_is_cast_too() -> None:
    model = on_meta("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    plan = planned(spec_of(r"model\.embed_tokens"), model)
    assert plan.fp32_modules == ("model.embed_tokens", "lm_head")
    assert plan.fp32_parameters == ("model.embed_tokens.weight",)


@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize(("pattern", "code"), [(".*", "FSDP-E211"), ("norm", "FSDP-E212")])
def test_pattern_that_selects_nothing_or_all_is_refused(pattern: str, code: str) -> None:
    assert refused(code, spec_of(pattern), on_meta("llama")).setting == "precision.fp32_modules"


@pytest.mark.usefixtures("newest")
def test_modules_without_parameters_are_refused() -> None:
    problem = refused("FSDP-E212", spec_of(r".*act_fn"), on_meta("llama"))
    assert "no sharded parameter" in problem.message


@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("param", ["bf16", "auto"])
def test_parameters_that_are_not_stored_in_fp32_are_refused(param: str) -> None:
    model = on_meta("llama").to(torch.bfloat16)
    model.requires_grad_(param == "auto")
    model.lm_head.requires_grad_(True)
    problem = refused("FSDP-E283", spec_of(r"model\.norm", param=param), model)
    assert "bfloat16" in problem.message


@pytest.mark.usefixtures("newest")
def test_trained_parameters_in_bf16_are_stored_in_fp32() -> None:
    assert planned(spec_of(r"model\.norm"), on_meta("llama").to(torch.bfloat16)).fp32_modules == ("model.norm",)


@pytest.mark.parametrize("version", [1, 2])
def test_one_dtype_per_unit_is_refused(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "is_since_2_15", lambda: False)
    problem = refused("FSDP-E282", spec_of(r"model\.norm", version), on_meta("llama"))
    assert "2.15" in problem.fix
    assert ("fsdp_version: 2" in problem.fix) == (version == 1)


def test_without_mixed_precision_nothing_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "is_since_2_15", lambda: False)
    plan = planned(spec_of(r"model\.norm", param="auto"), on_meta("llama"))
    assert plan.fp32_modules == plan.fp32_parameters == ()


@pytest.mark.usefixtures("newest")
def test_fp32_modules_are_counted_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(8, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 2, bias=False))
    spec = spec_of("1")
    plan = planned(replace(spec, wrap=replace(spec.wrap, policy="none")), model)
    (sizes,) = unit_bytes(plan, model)
    matrices, norm = 8 * 6 + 6 * 2, 2 * 6
    assert sizes.gathered == 2 * matrices + 4 * norm
    assert sizes.compute_shard == 2 * matrices // 2  # the shard of the norm is gathered as it is
    assert sizes.reduce_input == 4 * (matrices + norm)
    assert sizes.cast_grads == 4 * matrices
