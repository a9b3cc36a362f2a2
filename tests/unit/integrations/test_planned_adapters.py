"""LoRA and QLoRA: which parameters are trained, and what packed weights take."""

import sys

import pytest
import torch
import transformers as hf

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.tools.plan.adapters import with_lora
from hf_fsdp_plugin.tools.plan.estimate.memory.peak import estimate_memory
from hf_fsdp_plugin.tools.plan.estimate.types import Workload

HIDDEN, INNER, LAYERS, RANK = 64, 128, 6, 4
LINEARS = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
ADAPTERS = RANK * (4 * 2 * HIDDEN + 3 * (HIDDEN + INNER))


def adapted(*, quantized: bool) -> torch.nn.Module:
    config = hf.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, vocab_size=256, num_hidden_layers=LAYERS, num_attention_heads=4
    )
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
    return with_lora(model.to(torch.bfloat16), rank=RANK, quantized=quantized)


def estimate(model: torch.nn.Module, version: int):
    spec = hfp.load_spec(fsdp="full_shard auto_wrap", fsdp_config={"version": version, "mixed_precision": "bf16"})
    plan = hfp.resolve(spec, model, world_size=2, device_type="cuda")
    return estimate_memory(plan, model, Workload(micro_batch=2, seq_len=32))


@pytest.mark.parametrize("version", [1, 2])
def test_only_adapters_have_gradients_and_states(version):
    end = next(m for m in estimate(adapted(quantized=False), version).timeline if m.where == "clipping").bytes_by_kind
    trained = LAYERS * ADAPTERS // 2 * 4
    assert trained <= end["grads"] <= trained * 1.02  # padding
    assert 2 * trained <= end["optimizer"] <= 2.1 * trained


def test_packed_weights_take_half_a_byte_per_element():
    plain, packed = (estimate(adapted(quantized=quantized), 2) for quantized in (False, True))
    saved = plain.peak.bytes_by_kind["params"] - packed.peak.bytes_by_kind["params"]
    assert saved == LAYERS * LINEARS // 2 * 2 - LAYERS * LINEARS // 2 // 2
    scales = packed.peak.bytes_by_kind["other"] - plain.peak.bytes_by_kind["other"]
    assert LAYERS * LINEARS // 64 <= scales <= LAYERS * LINEARS // 60  # not sharded


def test_missing_peft_is_a_problem(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SpecError) as caught:
        adapted(quantized=False)
    assert [problem.code for problem in caught.value.problems] == ["FSDP-E727"]
