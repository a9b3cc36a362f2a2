"""Dtypes, frozen and quantized parameters: what FSDP would refuse at the first step is refused in the plan."""

from __future__ import annotations

import pytest
import torch
from model_families import on_meta, refused, wrapping
from torch import nn

from hf_fsdp_plugin.plan.resolve import resolve, try_resolve
from hf_fsdp_plugin.spec.model import FsdpSection, FsdpSpec, ParamsSection, PrecisionSection, WrapSection


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


def spec_of(version: int, *, use_orig: bool = False, param: str = "auto", ignored: str = "") -> FsdpSpec:
    return FsdpSpec(
        fsdp=FsdpSection(version=version),  # type: ignore[arg-type]
        wrap=WrapSection(policy="transformer", classes=("Layer",), ignored_modules=ignored),
        params=ParamsSection(use_orig=use_orig),
        precision=PrecisionSection(param=param),  # type: ignore[arg-type]
    )


def with_frozen_base(dtype: torch.dtype = torch.float32) -> Stack:
    """As with LoRA: the base is frozen in its dtype, the adapters are trained in float32."""
    model = Stack()
    for layer in model.layers:
        layer.base.to(dtype).requires_grad_(False)
    return model


def test_dtypes_and_frozen_parameters_are_listed_per_unit() -> None:
    unit = resolve(spec_of(2), with_frozen_base(torch.bfloat16), world_size=2).units[0]
    assert dict(unit.dtypes) == {"bfloat16": 64, "float32": 16}
    assert unit.frozen == ("layers.0.base.weight",)


def test_version_1_refuses_two_dtypes_in_a_unit_once() -> None:
    problem = refused("FSDP-E221", spec_of(1, use_orig=True), with_frozen_base(torch.bfloat16))
    assert "2 units break this rule: layers.0, layers.1." in problem.message
    assert "In layers.0 (Layer), most parameters are bfloat16" in problem.message
    assert "float32: layers.0.adapter.weight" in problem.message
    assert (problem.setting, "bfloat16" in problem.fix) == ("fsdp.version", True)


def test_version_2_accepts_frozen_parameters_of_another_dtype() -> None:
    resolve(spec_of(2), with_frozen_base(torch.bfloat16), world_size=2)


@pytest.mark.parametrize("version", [1, 2])
def test_mixed_precision_allows_trainable_parameters_of_two_dtypes(version: int) -> None:
    model = Stack()
    model.layers[1].adapter.to(torch.bfloat16)
    assert "bfloat16: layers.1.adapter.weight" in refused("FSDP-E221", spec_of(version), model).message
    plan = resolve(spec_of(version, param="bf16"), model, world_size=2)
    assert plan.precision.master == "fp32"


def test_mixed_precision_does_not_cast_frozen_parameters() -> None:
    refused("FSDP-E221", spec_of(1, use_orig=True, param="bf16"), with_frozen_base(torch.bfloat16))


def test_flat_parameters_refuse_frozen_and_trainable_in_a_unit() -> None:
    problem = refused("FSDP-E222", spec_of(1), with_frozen_base())
    assert "2 units break this rule: layers.0, layers.1. In layers.0 (Layer), " in problem.message
    assert "layers.0.base.weight" in problem.message
    assert (problem.setting, "fsdp_use_orig_params: true" in problem.fix) == ("params.use_orig", True)
    resolve(spec_of(1, use_orig=True), with_frozen_base(), world_size=2)
    resolve(spec_of(2), with_frozen_base(), world_size=2)


def test_flat_parameters_allow_a_frozen_unit() -> None:
    model = Stack()
    model.layers[0].requires_grad_(False)
    assert len(resolve(spec_of(1), model, world_size=2).units[0].frozen) == 2


@pytest.mark.parametrize("version", [1, 2])
def test_quantized_weights_are_refused_unless_ignored(version: int) -> None:
    model = Stack()
    model.layers[0].base.weight = nn.Parameter(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)
    problem = refused("FSDP-E220", spec_of(version, use_orig=True), model)
    assert "uint8" in problem.message
    assert "layers.0.base.weight" in problem.message
    assert "bnb_4bit_quant_storage" in problem.fix
    resolve(spec_of(version, use_orig=True, ignored=r"layers\.\d\.base"), model, world_size=2)


@pytest.mark.parametrize("version", [1, 2])
def test_scalars_are_not_sharded(version: int) -> None:
    plan = resolve(wrapping("CLIPEncoderLayer", version=version), clip(), world_size=2)
    assert plan.ignored_parameters == ("logit_scale",)
    assert not any("logit_scale" in unit.parameters for unit in plan.units)


def clip() -> nn.Module:
    import transformers as hf

    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.CLIPConfig(
        text_config={**size, "vocab_size": 96, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**size, "image_size": 8, "patch_size": 4},
        projection_dim=16,
    )
    with torch.device("meta"):
        return hf.CLIPModel(config)


def test_failed_policy_reports_nothing_about_the_root() -> None:
    _, problems = try_resolve(wrapping("Blok", version=1, use_orig=False), on_meta("whisper"), world_size=2)
    assert [(problem.code, problem.setting) for problem in problems] == [("FSDP-E214", "wrap.classes")]
