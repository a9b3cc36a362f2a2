"""The planner divides the matrices of Muon as the steps do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_fsdp_plugin.tools.plan.estimate.machines import machine_named
from hf_fsdp_plugin.tools.plan.estimate.memory.peak import estimate_memory
from hf_fsdp_plugin.tools.plan.estimate.muon import MuonStep, muon_step
from hf_fsdp_plugin.tools.plan.estimate.time import TimeModel, estimate_communication
from hf_fsdp_plugin.tools.plan.estimate.types import Workload
from hf_fsdp_plugin.tools.plan.estimate.unit_bytes import unit_bytes
from tests.unit.estimate.test_memory import llama, plan_of

MUON = Workload(micro_batch=1, seq_len=16, optimizer="muon")


def step_of(ranks: int, strategy: str = "full_shard") -> MuonStep:
    plan = plan_of(ranks, strategy=strategy)
    return muon_step(plan, [shard for unit in unit_bytes(plan, llama()) for shard in unit.shards])


@pytest.mark.parametrize(("ranks", "strategy"), [(2, "full_shard"), (4, "full_shard"), (4, "hybrid_shard")])
def test_work_of_a_rank_falls_with_the_ranks(ranks: int, strategy: str) -> None:
    alone, step = step_of(1), step_of(ranks, strategy)
    assert (alone.share, alone.exchanges) == (1, {})
    assert 1 <= step.share * ranks <= 1.25 and step.flops == pytest.approx(alone.flops * step.share)
    assert sum(step.exchanges.values()) == 2 and bool(step.results) == (strategy == "hybrid_shard")


def test_plan_includes_the_exchanges_and_names_the_division() -> None:
    model: Any = llama()
    plan = plan_of(4, strategy="hybrid_shard")
    calls = [call for call in estimate_communication(plan, model, MUON) if call.phase == "update"]
    assert [(call.kind, call.axis, call.group_size, call.calls) for call in calls] == [
        ("all_to_all", "shard", 2, 2), ("all_gather", "replicate", 2, 1),
    ]  # fmt: skip
    assumptions = estimate_memory(plan, model, MUON).assumptions
    assert any(text.startswith("Muon divides ") and "over 4 ranks" in text for text in assumptions)


def test_time_of_the_update_falls_with_the_ranks() -> None:
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8, vocab_size=1024
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    machine, seconds = machine_named("h100-sxm"), {}
    for ranks in (1, 8):
        plan = plan_of(ranks, model=model, device="cuda")
        with_sgd, with_muon = (
            TimeModel(plan, model, replace(MUON, optimizer=name)).estimate(machine).step_seconds
            for name in ("sgd", "muon")
        )
        seconds[ranks] = with_muon - with_sgd
    assert 0 < seconds[8] < 0.5 * seconds[1]
