"""Units of well-known models, with the layer classes that guides recommend and with the model's own."""

from __future__ import annotations

import math
import time

import pytest
import torch
import transformers as hf
from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.modules import no_split_classes
from tests.support.model_families import FAMILIES, TEXT_CONFIG, on_meta
from tests.unit.plan.plans import planned, units_of, wrapping

ALL = pytest.mark.parametrize("family", FAMILIES)


def assert_each_parameter_is_owned_once(plan: FsdpPlan, model: nn.Module) -> None:
    owned = [name for unit in plan.units for name in unit.parameters]
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert sorted([*owned, *plan.ignored_parameters]) == sorted(sizes)
    assert plan.num_params == sum(sizes[name] for name in owned)


@ALL
def test_recommended_classes_select_expected_units(family: str) -> None:
    model = on_meta(family)
    plan = planned(wrapping(*FAMILIES[family].layers), model)
    assert tuple(unit.name for unit in plan.units) == (*FAMILIES[family].units, "")
    assert_each_parameter_is_owned_once(plan, model)


@ALL
def test_version_1_wraps_only_the_layers_and_the_root(family: str) -> None:
    model = on_meta(family)
    plan = planned(wrapping(*FAMILIES[family].layers, version=1), model)
    assert {unit.class_name for unit in plan.units[:-1]} == set(FAMILIES[family].layers)
    assert [unit.name for unit in plan.units if not unit.from_policy] == [""]
    assert_each_parameter_is_owned_once(plan, model)


@ALL
@pytest.mark.parametrize("version", [1, 2])
def test_declared_layers_are_wrapped_without_classes(family: str, version: int) -> None:
    model = on_meta(family)
    plan = planned(wrapping(version=version), model)
    assert set(FAMILIES[family].layers) <= {unit.class_name for unit in plan.units}
    assert {unit.class_name for unit in plan.units if unit.from_policy} <= set(no_split_classes(model))
    assert_each_parameter_is_owned_once(plan, model)


def test_resolve_does_not_change_the_model() -> None:
    def state(model: nn.Module) -> tuple[object, object]:
        parameters = {name: (id(p), p.requires_grad, p.dtype) for name, p in model.named_parameters()}
        return parameters, {name: type(module) for name, module in model.named_modules()}

    model = on_meta("llama-tied")
    before = state(model)
    planned(wrapping(), model)
    assert state(model) == before


def test_nested_layer_is_a_unit_but_not_checkpointed() -> None:
    plan = planned(wrapping(), on_meta("mamba"))  # declares both MambaBlock and the MambaMixer inside it
    mixer, block = plan.units[1:3]
    assert (mixer.name, mixer.from_policy) == ("backbone.layers.0.mixer", False)
    assert (block.name, block.from_policy) == ("backbone.layers.0", True)


def test_norm_and_head_stay_gathered_after_forward() -> None:
    plan = planned(wrapping("LlamaDecoderLayer"), on_meta("llama"))
    assert [unit.name for unit in plan.units if not unit.reshard_after_forward] == ["model.norm + lm_head", ""]


def test_unit_of_moe_layer_contains_experts() -> None:
    plan = planned(wrapping("MixtralDecoderLayer"), on_meta("mixtral"))
    layer = next(unit for unit in plan.units if unit.name == "model.layers.0")
    assert any("experts" in name for name in layer.parameters)


@pytest.mark.parametrize(
    ("model_class", "config", "layers"),
    [
        (hf.DistilBertForMaskedLM, {"n_layers": 2, "dim": 32, "n_heads": 4}, "TransformerBlock"),
        (hf.ElectraForMaskedLM, {"num_hidden_layers": 2}, "ElectraLayer"),
        (hf.PvtForImageClassification, {}, "PvtLayer,PvtPatchEmbeddings"),
        (hf.MarianMTModel, {"encoder_layers": 2, "decoder_layers": 2}, "MarianDecoderLayer,MarianEncoderLayer"),
    ],
)
def test_repeated_layers_are_units(model_class: type, config: dict[str, int], layers: str) -> None:
    with torch.device("meta"):
        model = model_class(model_class.config_class(**config))
    named, found = planned(wrapping(*layers.split(",")), model), planned(wrapping(), model)
    assert {unit.class_name for unit in found.units if unit.from_policy} == set(layers.split(","))
    assert found.units == named.units


def test_time_to_resolve_grows_with_the_layers_only() -> None:
    seconds: dict[int, float] = {}
    for layers in (20, 80):
        with torch.device("meta"):
            model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**TEXT_CONFIG, "num_hidden_layers": layers}))
        for _ in range(3):  # best of three, because other processes may use the cores
            started = time.process_time()
            assert len(units_of(wrapping(), model)) == layers + 3
            seconds[layers] = min(seconds.get(layers, math.inf), time.process_time() - started)
    assert seconds[80] < 8 * seconds[20]  # 4 times the layers; 16 times as long if it grew with their square
