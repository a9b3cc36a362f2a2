"""Dtypes, frozen and quantized parameters: what FSDP would refuse at the first step is refused in the plan."""

from __future__ import annotations

import pytest
import torch
from model_families import on_meta, wrapping
from torch import nn

from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import SpecError
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
    """As an adapter method leaves it: the base frozen in its dtype, the adapters trained in float32."""
    model = Stack()
    for layer in model.layers:
        layer.base.to(dtype).requires_grad_(False)
    return model


def test_dtypes_and_frozen_parameters_are_listed_per_unit() -> None:
    unit = resolve(spec_of(2), with_frozen_base(torch.bfloat16), world_size=2).units[0]
    assert dict(unit.dtypes) == {"bfloat16": 64, "float32": 16}
    assert unit.frozen == ("layers.0.base.weight",)


def test_version_1_refuses_a_unit_of_two_dtypes_with_the_names() -> None:
    with pytest.raises(
        SpecError, match=r"needs uniform dtype, but layers\.0 \(Layer\) is bfloat16 except for"
    ) as caught:
        resolve(spec_of(1, use_orig=True), with_frozen_base(torch.bfloat16), world_size=2)
    assert "float32: layers.0.adapter.weight" in str(caught.value)
    assert "Set fsdp_version: 2, cast them to bfloat16" in str(caught.value)


def test_version_2_takes_frozen_parameters_of_another_dtype() -> None:
    resolve(spec_of(2), with_frozen_base(torch.bfloat16), world_size=2)


@pytest.mark.parametrize("version", [1, 2])
def test_trainable_parameters_of_two_dtypes_are_refused_unless_mixed_precision_makes_them_one(version: int) -> None:
    model = Stack()
    model.layers[1].adapter.to(torch.bfloat16)
    with pytest.raises(SpecError, match=r"uniform dtype.*bfloat16: layers\.1\.adapter\.weight"):
        resolve(spec_of(version), model, world_size=2)
    plan = resolve(spec_of(version, param="bf16"), model, world_size=2)
    assert plan.precision.master == "fp32"


def test_mixed_precision_does_not_cast_frozen_parameters() -> None:
    with pytest.raises(SpecError, match="uniform dtype"):
        resolve(spec_of(1, use_orig=True, param="bf16"), with_frozen_base(torch.bfloat16), world_size=2)


def test_version_1_refuses_frozen_beside_trainable_unless_original_parameters_are_kept() -> None:
    with pytest.raises(SpecError, match=r"uniform requires_grad in a unit, but in layers\.0 \(Layer\)") as caught:
        resolve(spec_of(1), with_frozen_base(), world_size=2)
    assert "layers.0.base.weight" in str(caught.value)
    assert "Set fsdp_use_orig_params: true" in str(caught.value)
    resolve(spec_of(1, use_orig=True), with_frozen_base(), world_size=2)
    resolve(spec_of(2), with_frozen_base(), world_size=2)


def test_a_unit_that_is_frozen_as_a_whole_is_fine_under_version_1() -> None:
    model = Stack()
    model.layers[0].requires_grad_(False)
    assert len(resolve(spec_of(1), model, world_size=2).units[0].frozen) == 2


@pytest.mark.parametrize("version", [1, 2])
def test_quantized_weights_are_refused_with_names_unless_ignored(version: int) -> None:
    model = Stack()
    model.layers[0].base.weight = nn.Parameter(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(SpecError, match=r"hold integers \(uint8\).*layers\.0\.base\.weight") as caught:
        resolve(spec_of(version, use_orig=True), model, world_size=2)
    assert "bnb_4bit_quant_storage" in str(caught.value)
    resolve(spec_of(version, use_orig=True, ignored=r"layers\.\d\.base"), model, world_size=2)


@pytest.mark.parametrize("version", [1, 2])
def test_scalars_stay_whole_as_neither_fsdp_takes_them(version: int) -> None:
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


def test_a_failed_policy_raises_no_alarm_about_the_root() -> None:
    with pytest.raises(SpecError) as caught:
        resolve(wrapping("Blok", version=1, use_orig=False), on_meta("whisper"), world_size=2)
    assert [problem.setting for problem in caught.value.problems] == ["wrap.classes"]
