"""The spec of a further model: its wrap settings fit the model, and differences are reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.plan.wrap_policy import spec_of_further_model
from tests.support.model_families import on_meta


def spec_of(**settings: Any) -> hfp.FsdpSpec:
    config = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **settings}
    return hfp.load_spec({"distributed_type": "FSDP", "fsdp_config": config}, environ={})


def codes(spec: hfp.FsdpSpec) -> list[str]:
    return [problem.code for problem in spec.problems]


def test_fitting_settings_are_unchanged() -> None:
    spec = spec_of(fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer", fsdp_ignored_modules="lm_head")
    assert spec_of_further_model(spec, on_meta("llama"), is_trained=True) == spec


@pytest.mark.parametrize(
    ("settings", "model", "policy"),
    [
        ({"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}, "bert", "transformer"),
        ({"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}, "plain", "none"),
        ({}, "plain", "none"),
        ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 10**9}, "bert", "none"),
    ],
)
def test_other_settings_are_replaced_with_a_warning(settings: dict[str, Any], model: str, policy: str) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2)) if model == "plain" else on_meta(model)
    spec = spec_of_further_model(spec_of(**settings), module, is_trained=True)
    assert (spec.wrap.policy, spec.wrap.classes) == (policy, ())
    assert "FSDP-W260" in codes(spec)
    assert hfp.resolve(spec, module, world_size=2).num_params > 0


def test_pattern_without_match_is_removed() -> None:
    spec = spec_of_further_model(spec_of(fsdp_ignored_modules="lm_head"), on_meta("bert"), is_trained=True)
    assert spec.wrap.ignored_modules == ""
    assert not spec.asked("wrap.ignored_modules")


def test_checkpointing_is_kept_for_trained_models_only() -> None:
    spec = spec_of(fsdp_activation_checkpointing=True)
    assert spec_of_further_model(spec, on_meta("llama"), is_trained=True).activation.checkpointing == "full"
    assert spec_of_further_model(spec, on_meta("llama"), is_trained=False).activation.checkpointing == "none"
