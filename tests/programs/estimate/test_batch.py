"""The part of tests/unit/estimate/test_batch.py that starts processes or computes for seconds."""

import inspect
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.tools.plan.estimate.memory.meta_pass import meta_batch
from hf_fsdp_plugin.tools.plan.estimate.memory.peak import estimate_memory
from hf_fsdp_plugin.tools.plan.estimate.time import TimeModel
from hf_fsdp_plugin.tools.plan.estimate.types import Workload
from tests.unit.estimate.test_batch import SIZES, made


@pytest.mark.parametrize("family", ["t5", "whisper", "clip"])
def test_units_of_two_stacks_have_costs(family):
    model = made(family)
    if family == "whisper" and "self.layerdrop > 0" not in inspect.getsource(type(model.model.encoder)):
        pytest.skip("this version of Transformers draws a number for each layer, also without LayerDrop")
    spec = hfp.load_spec(fsdp="full_shard auto_wrap", fsdp_config={"activation_checkpointing": True})
    plan = hfp.resolve(spec, model, world_size=2)
    workload = Workload(micro_batch=2, seq_len=16)
    assert estimate_memory(plan, model, workload).peak.bytes > 0
    assert set(TimeModel(plan, model, workload).costs) == {unit.name for unit in plan.units} | {""}


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_adapters_do_not_change_the_batch(family):
    """PEFT's wrapper of a model without a task type takes any arguments."""
    sizes = {"micro_batch": 2, "seq_len": 16}
    with torch.device("meta"):
        model = made("t5") if family == "t5" else hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, vocab_size=64))
    plain = meta_batch(model, **sizes)
    adapted: Any = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    assert {key: tensor.shape for key, tensor in meta_batch(adapted, **sizes).items()} == {
        key: tensor.shape for key, tensor in plain.items()
    }
    plan = hfp.resolve(hfp.load_spec(overrides={"fsdp.version": 2}, environ={}), adapted, world_size=4)
    workload = Workload(micro_batch=2, seq_len=16)
    assert TimeModel(plan, adapted, workload).costs and estimate_memory(plan, adapted, workload).peak.bytes > 0
