"""The published runs: errors and coverage by cross validation, the figures that ship, and what is said without runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.tools.plan.estimate.machines import machine_named
from hf_fsdp_plugin.tools.plan.estimate.time import interval_of
from scripts.bench.measure import clock_fit
from scripts.bench.measure import published_runs as published

ROOT = Path(__file__).resolve().parents[3]

RESULT = json.loads((ROOT / "docs" / "results" / "published_runs.json").read_text(encoding="utf-8"))
DENSE = [row for row in RESULT["rows"] if row["source"] not in published.SPECIAL]
H100 = machine_named("h100-sxm")


@pytest.fixture(scope="module")
def linear():
    rows = RESULT["rows"]
    return clock_fit.Linear(
        [row["source"] for row in rows], np.array(RESULT["point"]), np.array([row["logarithm"] for row in rows]),
        np.array([[float(slope) for slope in row["slopes"].split()] for row in rows]),
    )  # fmt: skip


def test_result_has_every_published_run():
    found = [(run.source, run.name, run.throughput) for run in published.runs()]
    assert found == [(row["source"], row["run"], row["published"]) for row in RESULT["rows"]]
    assert len(found) >= 60 and len({source for source, *_ in found}) >= 8


def test_cross_validation_repeats_errors_and_coverage(linear):
    known = {fold.source: fold for fold in clock_fit.folds(linear, published.COVERAGE)}
    errors = np.exp(-clock_fit.held_out(linear)) - 1
    inside = [known[s].low <= 1 + error <= known[s].high for s, error in zip(linear.sources, errors, strict=True)]
    assert np.median(np.abs(errors)) < 0.10
    assert np.mean(inside) >= 0.8
    # The errors of the rows are those of the time model itself, not of its derivatives.
    assert np.median(np.abs(errors - [row["error"] for row in RESULT["rows"]])) < 0.02
    assert sum(inside) == pytest.approx(RESULT["inside"], abs=10)


def test_machines_have_the_fitted_figures():
    values = {name: parameter["value"] for name, parameter in RESULT["parameters"].items()}
    for name, device in (("a100-80gb", "a100"), ("a100-40gb", "a100"), ("h100-sxm", "h100"), ("h200", "h100")):
        machine = machine_named(name)
        shipped = {
            f"{device} matmul": machine.matmul, f"{device} attention": machine.attention, "memory": machine.memory,
            "fusion": machine.fusion, "kernel seconds": machine.kernel_seconds, "op seconds": machine.op_seconds,
            "contention": machine.contention, "network": machine.network_fraction,
        }  # fmt: skip
        assert shipped == pytest.approx({each: values[each] for each in shipped}, rel=0.02)
        evidence = machine.evidence
        assert (evidence.low, evidence.high) == pytest.approx((RESULT["low"], RESULT["high"]), abs=0.011)
        inside = [row["inside"] for row in DENSE if row["device"] == device]
        assert (evidence.inside, evidence.runs) == (sum(inside), len(inside))
        assert evidence.inside / evidence.runs >= 0.8


@pytest.mark.parametrize("index", range(0, len(RESULT["rows"]), 36))
def test_time_model_predicts_what_the_result_says(index):
    row, run = RESULT["rows"][index], list(published.runs())[index]
    values = {name: parameter["value"] for name, parameter in RESULT["parameters"].items()}
    seconds = published.Prepared(run).seconds(values)
    assert run.tokens / seconds == pytest.approx(row["fitted"], rel=0.01)


@pytest.mark.slow
def test_all_runs_are_predicted_within_bounds(linear):
    prepared = [published.Prepared(run) for run in published.runs()]
    again = published.evaluate(prepared, linear)
    assert again["median_error"] < 0.10 and again["groups"]["dense models"]["median_error"] < 0.10
    assert again["inside"] >= 0.8 * again["runs"]


def planned(model, **settings):
    config = {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16", "fsdp_config": settings}
    return resolve(load_spec(config, environ={}), model, world_size=8, device_type="cuda")


def small(make, config, **sizes):
    common = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.device("meta"):
        return make(config(**common, vocab_size=128, **sizes))


def test_dense_decoder_has_an_interval_with_its_evidence():
    model = small(LlamaForCausalLM, LlamaConfig)
    low, high, words = interval_of(H100, planned(model), model, "bf16")
    assert low < 1 < high
    assert words.startswith(f"{H100.evidence.inside} of {H100.evidence.runs} published runs on H100")


def test_kinds_without_published_runs_have_no_interval():
    dense = small(LlamaForCausalLM, LlamaConfig)
    experts = small(MixtralForCausalLM, MixtralConfig, num_local_experts=2)
    encoder = small(BertForMaskedLM, BertConfig)
    frozen = small(LlamaForCausalLM, LlamaConfig)
    frozen.model.embed_tokens.requires_grad_(False)
    cases = [(H100, model, "bf16") for model in (experts, encoder, frozen)]
    cases += [(H100, dense, "fp16"), *((machine_named(name), dense, "bf16") for name in ("b200", "h100-pcie"))]
    for machine, model, dtype in cases:
        low, high, words = interval_of(machine, planned(model), model, dtype)
        assert (low, high) == (None, None) and words.startswith("no interval: ")
    assert interval_of(H100, planned(dense, fsdp_offload_params=True), dense, "bf16")[0] is None
