"""A plan as text that reads well and stays the same, and as the JSON of ``check --json``."""

from __future__ import annotations

import json

import pytest
from model_families import on_meta, wrapping

from hf_fsdp_plugin.plan.render import count_text, to_json, to_text
from hf_fsdp_plugin.plan.resolve import resolve


def test_the_text_folds_layers_and_is_the_same_every_time() -> None:
    plan = resolve(wrapping("LlamaDecoderLayer"), on_meta("llama-tied"), world_size=4)
    assert (
        to_text(plan)
        == str(plan)
        == """\
LlamaForCausalLM · 23.7 k parameters · FSDP2 on 4 cpu ranks
  strategy             full_shard
  mesh                 1 × 4 (replicate × shard)
  precision            param unchanged · reduce fp32 · output unchanged · buffer unchanged · master unchanged
  offload              none
  prefetch             backward none · forward no · limit all-gathers yes
  checkpointing        none
  loading              RAM-efficient no · sync module states yes
  state dict           sharded
  original parameters  yes

unit                                       class                              parameters   dtype    after forward
model.embed_tokens + model.norm + lm_head  Embedding + LlamaRMSNorm + Linear  3.1 k        float32  kept
model.layers.0–1                           LlamaDecoderLayer ×2               10.3 k each  float32  freed
(root)                                     LlamaForCausalLM                   0            –        kept

tied parameters
  model.embed_tokens.weight = lm_head.weight"""
    )


def test_runs_with_gaps_and_nested_layers_are_folded_too() -> None:
    text = to_text(resolve(wrapping(), on_meta("mamba"), world_size=2))
    assert "backbone.layers.0–1.mixer " in text
    model = on_meta("llama")
    model.model.layers[0].requires_grad_(False)
    text = to_text(resolve(wrapping(), model, world_size=2))
    assert "model.layers.0 " in text
    assert "model.layers.1 " in text
    assert "frozen parameters: 9" in text


def test_remarks_and_ignored_modules_are_listed() -> None:
    text = to_text(resolve(wrapping(ignored_modules="lm_head"), on_meta("llama"), world_size=2))
    assert "ignored modules: 1\n  lm_head" in text
    assert (
        "remarks\n  note: wrap.ignored_modules: 1 trainable parameters stay whole on every rank (lm_head.weight)"
        in text
    )


def test_the_json_has_the_documented_keys() -> None:
    plan = resolve(wrapping("LlamaDecoderLayer"), on_meta("llama"), world_size=4)
    found = json.loads(json.dumps(to_json(plan)))
    assert found["backend"] == "fsdp2"
    assert found["mesh"] == {"replicate": 1, "shard": 4}
    assert [(unit["name"], unit["class"]) for unit in found["units"]] == [
        ("model.embed_tokens", "Embedding"),
        ("model.layers.0", "LlamaDecoderLayer"),
        ("model.layers.1", "LlamaDecoderLayer"),
        ("model.norm + lm_head", "LlamaRMSNorm + Linear"),
        ("", "LlamaForCausalLM"),
    ]
    assert sum(unit["num_params"] for unit in found["units"]) == found["num_params"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1_000, "1 k"),
        (3_540_000, "3.54 M"),
        (999_400, "999 k"),
        (999_900, "1000 k"),
        (7e9, "7 B"),
    ],
)
def test_counts_show_the_digits_that_matter(count: int, text: str) -> None:
    assert count_text(int(count)) == text
