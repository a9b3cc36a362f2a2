"""Dtypes, and frozen, quantized and scalar parameters."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.problems import SpecError
from tests.support.model_families import on_meta
from tests.unit.plan.plans import planned, refused, wrapping


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8, bias=False)
        self.adapter = nn.Linear(8, 2, bias=False)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 2)


spec_of = partial(wrapping, "Layer", use_orig=False)


def with_frozen_base(dtype: torch.dtype = torch.float32) -> Stack:
    """As with LoRA: the base is frozen in its dtype, the adapters are trained in float32."""
    model = Stack()
    for layer in model.layers:
        layer.base.to(dtype).requires_grad_(False)
    return model


def test_dtypes_and_frozen_parameters_are_listed_per_unit() -> None:
    unit = planned(spec_of(version=2), with_frozen_base(torch.bfloat16)).units[0]
    assert dict(unit.dtypes) == {"bfloat16": 64, "float32": 16}
    assert unit.frozen == ("layers.0.base.weight",)


class Bare(Stack):
    """Layers whose base has a frozen weight and a trainable bias of another dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for layer in self.layers:
            layer.base = nn.Linear(8, 8)
            layer.base.weight = nn.Parameter(layer.base.weight.to(dtype), requires_grad=False)


def test_version_1_refuses_two_dtypes_in_a_module_once() -> None:
    problem = refused("FSDP-E221", spec_of(version=1, use_orig=True), Bare(torch.bfloat16))
    assert "2 units break this rule: layers.0, layers.1." in problem.message
    assert "In layers.0 (Layer), most parameters are bfloat16" in problem.message
    assert "float32: layers.0.base.bias" in problem.message
    assert (problem.setting, "bfloat16" in problem.fix) == ("fsdp.version", True)


def test_version_1_wraps_modules_of_another_dtype_apart() -> None:
    plan = planned(spec_of(version=1, use_orig=True), with_frozen_base(torch.bfloat16))
    assert units_of(plan) == {
        "layers.0.adapter": {"float32": 16},
        "layers.0": {"bfloat16": 64},
        "layers.1.adapter": {"float32": 16},
        "layers.1": {"bfloat16": 64},
        "": {"float32": 18},
    }
    [problem] = [problem for problem in plan.problems if problem.code == "FSDP-W265"]
    assert "2 modules are units of their own" in problem.message and "one dtype:" in problem.message
    assert problem.setting == "fsdp.version"


def units_of(plan: FsdpPlan) -> dict[str, dict[str, int]]:
    return {unit.name: dict(unit.dtypes) for unit in plan.units}


def test_version_2_accepts_frozen_parameters_of_another_dtype() -> None:
    planned(spec_of(version=2), with_frozen_base(torch.bfloat16))


@pytest.mark.parametrize("version", [1, 2])
def test_mixed_precision_allows_trainable_params_of_two_dtypes(version: int) -> None:
    model = Stack()
    model.head.weight = nn.Parameter(model.head.weight.to(torch.bfloat16))
    assert "float32: head.bias" in refused("FSDP-E221", spec_of(version=version), model).message
    plan = planned(spec_of(version=version, param="bf16"), model)
    assert plan.precision.master == "fp32"


def test_mixed_precision_does_not_cast_frozen_parameters() -> None:
    refused("FSDP-E221", spec_of(version=1, use_orig=True, param="bf16"), Bare(torch.bfloat16))
    model = with_frozen_base(torch.bfloat16)
    plan = planned(spec_of(version=1, use_orig=True, param="bf16"), model.to(torch.bfloat16))
    assert units_of(plan)["layers.0.adapter"] == {"bfloat16": 16}  # is cast to float32


def test_flat_parameters_refuse_frozen_and_trainable_in_a_module() -> None:
    problem = refused("FSDP-E222", spec_of(version=1), Bare())
    assert "2 units break this rule: layers.0, layers.1. In layers.0 (Layer), " in problem.message
    assert (problem.setting, "fsdp_use_orig_params: true" in problem.fix) == ("params.use_orig", True)
    planned(spec_of(version=1, use_orig=True), Bare())
    planned(spec_of(version=2), Bare())


def test_flat_parameters_wrap_trainable_modules_apart() -> None:
    plan = planned(spec_of(version=1), with_frozen_base())
    assert {unit.name: len(unit.frozen) for unit in plan.units} == {
        "layers.0.adapter": 0, "layers.0": 1, "layers.1.adapter": 0, "layers.1": 1, "": 0,
    }  # fmt: skip
    assert "FSDP-W265" in [problem.code for problem in plan.problems]
    assert len(planned(spec_of(version=1, use_orig=True), with_frozen_base()).units) == 3


def test_modules_whose_weights_are_read_are_not_units() -> None:
    model = Stack()
    model.layers[0].base = nn.MultiheadAttention(8, 2)
    model.layers[0].base.out_proj.requires_grad_(False)
    refused("FSDP-E222", spec_of(version=1), model)


def test_bare_parameter_of_another_kind_is_refused() -> None:
    model = with_frozen_base()
    model.layers[0].scale = nn.ParameterDict({"default": nn.Parameter(torch.ones(8))})
    assert "layers.0.scale.default" in refused("FSDP-E222", spec_of(version=1), model).message


def test_flat_parameters_allow_a_frozen_unit() -> None:
    model = Stack()
    model.layers[0].requires_grad_(False)
    assert len(planned(spec_of(version=1), model).units[0].frozen) == 2


@pytest.mark.parametrize("version", [1, 2])
def test_quantized_weights_are_refused_unless_ignored(version: int) -> None:
    model = Stack()
    model.layers[0].base.weight = nn.Parameter(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)
    problem = refused("FSDP-E220", spec_of(version=version, use_orig=True), model)
    assert "uint8" in problem.message
    assert "layers.0.base.weight" in problem.message
    assert "bnb_4bit_quant_storage" in problem.fix
    planned(spec_of(version=version, use_orig=True, ignored_modules=r"layers\.\d\.base"), model)


class ConvertedInGather(nn.Parameter):
    """As a weight of torchao with ``enable_fsdp_float8_all_gather``."""

    def fsdp_pre_all_gather(self, mesh: object) -> None: ...


@pytest.mark.parametrize("version", [1, 2])
def test_weights_with_an_own_gather_are_refused_unless_ignored(version: int) -> None:
    model = Stack()
    model.layers[0].base.weight = ConvertedInGather(torch.zeros(4, 4))
    problem = refused("FSDP-E121", spec_of(version=version, use_orig=True), model)
    assert "ConvertedInGather" in problem.message and "layers.0.base.weight" in problem.message
    planned(spec_of(version=version, use_orig=True, ignored_modules=r"layers\.\d\.base"), model)


def test_storage_of_quantized_weights_has_the_dtype_of_the_model() -> None:
    model = Stack().to(torch.float16)
    model.layers[0].base.weight = nn.Parameter(torch.zeros(32, 1, dtype=torch.int8), requires_grad=False)
    storage = "bnb_4bit_quant_storage=torch."
    assert storage + "float16" in refused("FSDP-E220", spec_of(version=2), model).fix
    assert storage + "bfloat16" in refused("FSDP-E220", spec_of(version=2, param="bf16"), model).fix


@pytest.mark.parametrize("version", [1, 2])
def test_mixed_precision_must_not_cast_quantized_weights(version: int) -> None:
    model = Stack()
    weight = nn.Parameter(torch.zeros(16, 1, dtype=torch.float16), requires_grad=False)
    weight.quant_state = object()  # type: ignore[attr-defined]
    model.layers[0].base.weight = weight
    problem = refused("FSDP-E266", spec_of(version=version, use_orig=True, param="bf16"), model)
    assert "layers.0.base.weight" in problem.message
    assert "bnb_4bit_quant_storage=torch.bfloat16" in problem.fix
    planned(spec_of(version=version, use_orig=True), model)


@pytest.mark.parametrize("version", [1, 2])
def test_scalars_are_not_sharded(version: int) -> None:
    plan = planned(wrapping("CLIPEncoderLayer", version=version), on_meta("clip"))
    assert plan.ignored_parameters == ("logit_scale",)
    assert not any("logit_scale" in unit.parameters for unit in plan.units)


def test_failed_policy_reports_nothing_about_the_root() -> None:
    with pytest.raises(SpecError) as caught:
        planned(wrapping("Blok", version=1, use_orig=False), on_meta("whisper"))
    assert [(problem.code, problem.setting) for problem in caught.value.problems] == [("FSDP-E214", "wrap.classes")]
