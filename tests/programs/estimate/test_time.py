"""The part of tests/unit/estimate/test_time.py that starts processes or computes for seconds."""

from __future__ import annotations

import pytest
from peft import LoraConfig, get_peft_model

from hf_fsdp_plugin.tools.plan.estimate.memory import meta_pass
from hf_fsdp_plugin.tools.plan.estimate.time import TimeModel
from tests.unit.estimate.test_time import STEP, llama, planned


@pytest.mark.parametrize("layers", [4, 9])
def test_units_of_other_sizes_have_the_same_operations(layers):
    model = llama(num_hidden_layers=layers)

    def total(**wrap):
        costs = TimeModel(planned(model, **wrap), model, STEP).costs
        return {
            kind: sum(c.flops * n for each in costs.values() for c, n in getattr(each, kind).items())
            for kind in ("forward", "backward")
        }

    nested = {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,LlamaMLP"}
    assert total() == total(fsdp_auto_wrap_policy="NO_WRAP") == total(**nested)
    costs = TimeModel(planned(model, **nested), model, STEP).costs
    assert costs["model.layers.2.mlp"] == costs["model.layers.1.mlp"] and costs["model.layers.2.mlp"].forward


def flops_and_bytes(costs):
    """Return unit -> FLOPs of products, FLOPs of attention and bytes, of forward and backward."""
    return {
        name: [
            [sum(c.flops * n for c, n in phase.items() if c.kind == kind) for kind in ("matmul", "attention")]
            + [sum(c.bytes * n for c, n in phase.items())]
            for phase in (unit.forward, unit.backward)
        ]
        for name, unit in costs.items()
    }


@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("classes", ["LlamaDecoderLayer", "LlamaDecoderLayer,LlamaAttention,LlamaMLP", "Embedding"])
def test_layers_that_are_skipped_cost_as_if_they_ran(monkeypatch, classes, adapters):
    """Also with attention, whose inputs are keyword arguments, and with frozen embeddings, which have no gradient."""
    model = llama(num_hidden_layers=7)
    if adapters:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1))
    plan = planned(model, fsdp_transformer_layer_cls_to_wrap=classes)
    found = flops_and_bytes(TimeModel(plan, model, STEP).costs)
    monkeypatch.setattr(meta_pass, "equal_layers", lambda *_: {})
    assert found == flops_and_bytes(TimeModel(plan, model, STEP).costs)
