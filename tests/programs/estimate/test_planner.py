"""The planner on several models: order, rejections, remedies, the decision tree, and the config of the best row."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers as hf

from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.tools.plan.estimate.machines import machine_named
from hf_fsdp_plugin.tools.plan.estimate.memory.peak import estimate_memory
from hf_fsdp_plugin.tools.plan.estimate.planner import (
    SAME_SPEED,
    Subject,
    advise,
    in_order,
    micro_batches,
    shardings,
)
from hf_fsdp_plugin.tools.plan.estimate.types import Workload
from tests.support.matrices import needs_transformers

MIB = 1 << 20


@cache
def model(family: str) -> torch.nn.Module:
    config, cls = {
        "llama": (
            hf.LlamaConfig(
                hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=8, vocab_size=1024
            ),
            hf.LlamaForCausalLM,
        ),
        "large-vocabulary": (
            hf.LlamaConfig(
                hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, vocab_size=1 << 15
            ),
            hf.LlamaForCausalLM,
        ),
        "large-layers": (
            hf.LlamaConfig(
                hidden_size=1024,
                intermediate_size=1 << 17,
                num_hidden_layers=2,
                num_attention_heads=8,
                num_key_value_heads=2,
                vocab_size=512,
            ),
            hf.LlamaForCausalLM,
        ),
        "mixtral": (
            hf.MixtralConfig(
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_local_experts=4,
                vocab_size=512,
            ),
            hf.MixtralForCausalLM,
        ),
        "gpt2": (hf.GPT2Config(n_embd=256, n_layer=6, n_head=4, vocab_size=1024), hf.GPT2LMHeadModel),
        "bert": (
            hf.BertConfig(
                hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4, vocab_size=512
            ),
            hf.BertForMaskedLM,
        ),
        "vit": (
            hf.ViTConfig(
                hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4, image_size=32
            ),
            hf.ViTForImageClassification,
        ),
    }[family]
    with torch.device("meta"):
        return cls(config)


@cache
def advice(family="llama", memory=1 << 33, machine="", seq_len=64, **options):
    if machine:
        options["machine"] = machine_named(machine)
    workload = Workload(micro_batch=1, seq_len=seq_len)
    return advise(model(family), workload, **{"global_batch": 16, "gpus_per_machine": 4} | options, gpu_memory=memory)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit"])
def test_models_with_room_need_no_recomputation(family):
    found = advice(family)
    assert found.best is not None and found.best.choice.checkpointing == "none"
    assert not found.rejected and not found.best.choice.offload_params


def test_peaks_are_those_of_estimate_memory():
    subject = subject_of("llama", 2)
    rows = [row for row in advice().rows if row.choice.micro_batch == 2]
    assert rows
    for row in rows[::5]:
        estimate = estimate_memory(subject.plan(row.choice), subject.model, subject.workload_of(row.choice))
        assert (estimate.peak, row.fits) == (row.memory.peak, True)


def test_rows_that_fit_are_within_the_headroom():
    free = advice().rows
    memory = int(sorted(row.memory.needed_bytes for row in free)[len(free) // 2] / 0.95)
    found = advice(memory=memory, headroom=0.95)
    assert found.limit == int(memory * 0.95)
    assert all(row.memory.peak.bytes < row.memory.needed_bytes <= found.limit for row in found.fitting)
    assert all(row.memory.needed_bytes > found.limit and " of it " in row.reason for row in found.rejected)
    assert found.rejected and found.fitting and found.best is found.rows[0] and found.best.reason == ""


@needs_transformers("5.19")
def test_offload_is_tried_only_if_nothing_else_fits():
    smallest = min(row.memory.needed_bytes for row in advice().rows)
    found = advice(memory=smallest - 1, headroom=1.0)
    assert {row.choice.offload_params for row in found.fitting} == {True}
    assert all(row.memory.host_bytes for row in found.fitting)
    assert any(row.choice.sync_each_batch for row in found.rows)
    rows = [row for row in advice(memory=smallest - 1, headroom=1.0, version=1).rows if row.choice.offload_params]
    assert not any(row.choice.sync_each_batch for row in rows)


def test_offload_of_the_state_is_weighed_with_full_shard():
    rows = [row for row in advice(machine="h100-sxm").rows if row.choice.offload_optimizer]
    assert rows and {row.choice.strategy for row in rows} == {"full_shard"}
    for row in rows:
        choice = replace(row.choice, offload_optimizer=False)
        (plain,) = [each for each in advice(machine="h100-sxm").rows if each.choice == choice]
        assert row.memory.host_bytes > plain.memory.host_bytes
        assert row.time.step_seconds > plain.time.step_seconds
        assert row.settings["offload.optimizer"] and not row.settings["offload.params"]


@needs_transformers("5.19")
def test_nothing_fits_names_a_change_that_does():
    smallest = min(row.memory.needed_bytes for row in advice(memory=MIB, seq_len=256).rows)
    found = advice(memory=smallest, headroom=1.0, seq_len=512)
    assert found.best is None
    assert any(text.startswith("Sequences of 256 tokens") for text in found.remedies)


def subject_of(family, version, **wrap):
    return Subject(
        model=model(family), workload=Workload(micro_batch=1, seq_len=64), version=version, precision="bf16", wrap=wrap,
        num_machines=1, gpus_per_machine=4,
    )  # fmt: skip


def test_global_batch_must_be_divisible():
    with pytest.raises(SpecError) as caught:
        advice(global_batch=6)
    assert [problem.code for problem in caught.value.problems] == ["FSDP-E812"]


def test_meshes_divide_the_world():
    found = list(shardings(3, 8))
    assert {each.shard * each.replicate for each in found} == {24}
    hybrid = {each.shard for each in found if each.strategy == "hybrid_shard"}
    assert hybrid == {2, 4, 8}
    assert micro_batches(12) == (1, 2, 4, 12)


def test_equally_fast_rows_prefer_memory_and_simple_meshes():
    found = advice(machine="h100-sxm", num_machines=2, gpus_per_machine=8, global_batch=64)
    best, limit = found.best, found.limit
    fastest = max(row.tokens_per_second for row in found.fitting)
    tied = [row for row in found.fitting if row.tokens_per_second >= fastest * (1 - SAME_SPEED)]
    assert found.fitting[: len(tied)] == tuple(tied) and len(tied) > 1
    assert best.choice.checkpointing == "none"
    assert best.choice.replicate == 1 or best.choice.shard == 1
    least = min(row.memory.peak.bytes for row in tied)
    assert best.tokens_per_second < fastest or best.memory.peak.bytes <= least + limit * 0.02
    speeds = [row.tokens_per_second for row in found.fitting[len(tied) :]]
    assert speeds == sorted(speeds, reverse=True)


def test_less_memory_is_preferred_among_equally_fast_rows():
    rows = advice(machine="h100-sxm", num_machines=2, gpus_per_machine=8, global_batch=64).fitting
    timed = [row for row in rows if row.choice.checkpointing == "none"][:20]
    same = [replace(row, time=replace(row.time, tokens_per_second=1e6 + number)) for number, row in enumerate(timed)]
    limit = max(row.memory.peak.bytes for row in same)  # so that differences of these tiny models count
    first = in_order(same, limit)[0]
    assert first.memory.peak.bytes <= min(row.memory.peak.bytes for row in same) + limit * 0.02
    slow = replace(first, time=replace(first.time, tokens_per_second=0.9e6))
    assert in_order([*same[:1], slow], limit)[0] is same[0]


@needs_transformers("5.19")
def test_axes_are_tried_where_nothing_else_fits():
    plain = advice("large-vocabulary", 1 << 36, seq_len=1 << 14, global_batch=4)
    assert not any(axis_sizes(row) for row in plain.rows)
    least = min(row.memory.needed_bytes for row in plain.rows)
    found = advice("large-vocabulary", int(least * 0.9 / 0.95), seq_len=1 << 14, global_batch=4)
    assert found.best is not None and not any(row.choice.offload_params for row in found.rows)
    tried = {name for row in found.rows for name in axis_sizes(row).items()}
    assert tried == {("context", 2), ("tensor", 2)}  # larger axes only communicate more
    assert all(axis_sizes(row) for row in found.fitting)
    assert all(row.settings[f"mesh.{name}"] == size for row in found.fitting for name, size in axis_sizes(row).items())
    for row in found.fitting:
        assert row.choice.shard * row.choice.context * row.choice.tensor == 4
        # The ranks of an axis train the same samples.
        assert row.choice.micro_batch * row.choice.accumulation * row.choice.shard == 4


@needs_transformers("5.19")
def test_pairs_of_axes_are_tried_where_no_axis_fits():
    """Layers are large, and two heads of keys and values limit the tensor axis."""
    found = advice("large-layers", 7500 * MIB, seq_len=1 << 11, global_batch=8, gpus_per_machine=8)
    assert {str(axis_sizes(row)) for row in found.fitting} == {"{'context': 4, 'tensor': 2}"}
    assert not any(row.choice.offload_params for row in found.rows)
    assert {"{'context': 8}", "{'tensor': 2}"} <= {str(axis_sizes(row)) for row in found.rejected}


@needs_transformers("5.20")
def test_context_axis_is_tried_with_an_expert_axis():
    found = advice("mixtral", MIB, gpus_per_machine=2, num_machines=2)
    assert {"{'expert': 2}", "{'context': 2, 'expert': 2}"} <= {str(axis_sizes(row)) for row in found.rejected}


def test_models_without_plan_get_no_axes():
    found = advice("gpt2", memory=1 << 20)
    assert found.best is None and not any(row.choice.tensor > 1 or row.choice.expert > 1 for row in found.rows)


def axis_sizes(row):
    return {name: size for name, size in row.choice.axes.items() if size > 1}
