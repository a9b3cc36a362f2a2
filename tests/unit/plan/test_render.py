"""The text of a plan, its JSON, and its values by canonical name."""

from __future__ import annotations

import json

import pytest

from hf_fsdp_plugin.spec.fsdp_spec import (
    ActivationSection,
    FsdpSpec,
    MeshSection,
    PrecisionSection,
    ShardingSection,
)
from hf_fsdp_plugin.vocabulary import BY_NAME
from tests.support.model_families import on_meta
from tests.unit.plan.plans import planned, wrapping


def test_text_has_settings_units_and_ties() -> None:
    plan = planned(wrapping("LlamaDecoderLayer"), on_meta("llama-tied"), world_size=4)
    assert (
        str(plan)
        == """\
LlamaForCausalLM · 23.7 k parameters · FSDP2 on 4 cpu ranks
  fsdp        version 2
  sharding    strategy full_shard · reduce_replicas_at_last_micro_batch false
  mesh        shard 4 · replicate 1 · context 1 · tensor 1 · expert 1 · context_exchange allgather
  wrap        policy transformer · classes LlamaDecoderLayer · min_num_params 0 · ignored_modules -
  offload     params false · optimizer false · pin_memory false
  precision   param unchanged · reduce fp32 · output unchanged · buffer unchanged · fp32_modules -
  prefetch    backward none · forward false · limit_all_gathers true
  checkpoint  state_dict sharded · asynchronous false · verify true · storage - · save_on_signal usr1
  metrics     log file · straggler_percent 20
  activation  checkpointing none · offload false · native false
  loading     ram_efficient false · sync_module_states true
  params      use_orig true

unit                                       class                              parameters   dtype    after forward
model.embed_tokens + model.norm + lm_head  Embedding + LlamaRMSNorm + Linear  3.1 k        float32  kept
model.layers.0–1                           LlamaDecoderLayer ×2               10.3 k each  float32  freed
(root)                                     LlamaForCausalLM                   0            –        kept

tied parameters
  model.embed_tokens.weight = lm_head.weight"""
    )


def test_units_share_a_row_unless_they_differ() -> None:
    assert "backbone.layers.0–1.mixer " in str(planned(wrapping(), on_meta("mamba")))
    model = on_meta("llama")
    model.model.layers[0].requires_grad_(False)
    text = str(planned(wrapping(), model))
    assert "model.layers.0 " in text
    assert "model.layers.1 " in text
    assert "frozen parameters: 9" in text


def test_text_lists_problems_and_ignored_modules() -> None:
    text = str(planned(wrapping(ignored_modules="lm_head"), on_meta("llama")))
    assert "ignored modules: 1\n  lm_head\n\nproblems\n  note: wrap.ignored_modules: " in text


def test_json_has_documented_keys() -> None:
    plan = planned(wrapping("LlamaDecoderLayer"), on_meta("llama"), world_size=4)
    found = json.loads(json.dumps(plan.to_json()))
    assert found["backend"] == "fsdp2"
    assert found["mesh"] == {"replicate": 1, "shard": 4, "context": 1, "tensor": 1, "expert": 1}
    assert [(unit["name"], unit["class"]) for unit in found["units"]] == [
        ("model.embed_tokens", "Embedding"),
        ("model.layers.0", "LlamaDecoderLayer"),
        ("model.layers.1", "LlamaDecoderLayer"),
        ("model.norm + lm_head", "LlamaRMSNorm + Linear"),
        ("", "LlamaForCausalLM"),
    ]
    assert sum(unit["num_params"] for unit in found["units"]) == found["num_params"]


def test_get_returns_resolved_values_by_canonical_name() -> None:
    spec = FsdpSpec(
        sharding=ShardingSection(strategy="full_shard"),
        mesh=MeshSection(replicate=2),
        precision=PrecisionSection(param="bf16"),
        activation=ActivationSection(native=True),
    )
    plan = planned(spec, on_meta("llama"), world_size=4)
    settings = dict(plan.settings())
    resolved = {"sharding.strategy": "hybrid_shard", "mesh.shard": 2, "precision.output": "unchanged"}
    assert {name: settings[name] for name in resolved} == resolved
    assert (plan.get("activation.native"), plan.get("launch.num_processes")) == (True, 4)
    assert settings == {name: plan.get(name) for name in settings}
    assert "auto" not in settings.values()
    assert {row.name for row in BY_NAME.values() if not row.internal} <= settings.keys()


@pytest.mark.parametrize("name", ["precision.master", "sharding.reshard", "units", "strategy", ""])
def test_get_refuses_other_names(name: str) -> None:
    plan = planned(FsdpSpec(), on_meta("llama"), world_size=1)
    with pytest.raises(KeyError):
        plan.get(name)
