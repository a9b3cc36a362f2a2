"""The closed form: bytes that are computed by hand on small models, and properties that hold for all settings."""

import time
from functools import cache
from math import ceil, log2

import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.backends.optimizers import offloaded_steps
from hf_fsdp_plugin.tools.plan.estimate.memory.peak import estimate_memory, state_bytes, update_bytes
from hf_fsdp_plugin.tools.plan.estimate.types import MEMORY_KINDS, Workload
from hf_fsdp_plugin.tools.plan.estimate.unit_bytes import ParameterShard, unit_bytes

HIDDEN, INNER, VOCAB, LAYERS, HEADS = 32, 64, 96, 6, 4
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER + 2 * HIDDEN
EMBEDDING, HEAD = VOCAB * HIDDEN, VOCAB * HIDDEN + HIDDEN
TOTAL = LAYERS * LAYER + EMBEDDING + HEAD
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
QUICK = settings(max_examples=6, derandomize=True)


@cache
def llama(layers: int = LAYERS) -> torch.nn.Module:
    config = hf.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, vocab_size=VOCAB, num_hidden_layers=layers,
        num_attention_heads=HEADS, max_position_embeddings=512,
    )  # fmt: skip
    with torch.device("meta"):
        return hf.LlamaForCausalLM(config)


def plan_of(ranks=2, version=2, strategy="full_shard", model=None, device="cpu", **config):
    options = {"version": version, **config}
    if strategy.startswith("hybrid"):
        options["dp_shard_size"] = 2
    spec = hfp.load_spec(fsdp=f"{strategy} auto_wrap", fsdp_config=options)
    return hfp.resolve(spec, model or llama(), world_size=ranks, device_type=device)


def estimate(ranks=2, micro_batch=1, seq_len=16, model=None, workload=None, **options):
    plan = plan_of(ranks, model=model, **options)
    return estimate_memory(
        plan, model or llama(), Workload(micro_batch=micro_batch, seq_len=seq_len, **(workload or {}))
    )


def at(found, where):
    """Return the bytes by kind of the last moment at a place."""
    return [moment for moment in found.timeline if moment.where == where][-1].bytes_by_kind


@pytest.mark.parametrize("version", [1, 2])
def test_states_of_even_shards_are_counted_exactly(version):
    """Every parameter of this model is divisible by 2 and aligned."""
    end = at(estimate(2, version=version), "clipping")
    num_tensors = LAYERS * 9 + 3
    assert (end["params"], end["grads"]) == (TOTAL // 2 * 4, TOTAL // 2 * 4)
    if version == 2:
        assert end["optimizer"] == 2 * end["params"] + 4 * num_tensors
    assert end["gathered"] == 0


def test_fsdp2_pads_each_parameter_to_equal_rows():
    sizes = {unit.name: unit for unit in unit_bytes(plan_of(5), llama())}
    rows = -(-VOCAB // 5)
    assert sizes["model.embed_tokens"].params == rows * HIDDEN * 4
    assert sizes["model.embed_tokens"].gathered == 5 * rows * HIDDEN * 4
    norm, square, wide, tall = -(-HIDDEN // 5), -(-HIDDEN // 5), -(-INNER // 5), -(-HIDDEN // 5)
    per_rank = 2 * norm + 4 * square * HIDDEN + 2 * wide * HIDDEN + tall * INNER
    assert sizes["model.layers.0"].params == per_rank * 4


def test_fsdp1_pads_each_flat_parameter_to_the_ranks():
    sizes = {unit.name: unit for unit in unit_bytes(plan_of(5, version=1), llama())}
    padded = -(-LAYER // 5) * 5
    assert (sizes["model.layers.0"].params, sizes["model.layers.0"].gathered) == (padded // 5 * 4, padded * 4)
    assert set(sizes) == {"", *(f"model.layers.{index}" for index in range(LAYERS))}


def test_mixed_precision_gathers_bf16_of_fp32_masters():
    whole = unit_bytes(plan_of(2), llama())
    mixed = unit_bytes(plan_of(2, mixed_precision="bf16"), llama())
    for one, other in zip(whole, mixed, strict=True):
        assert (other.params, other.reduce_input) == (one.params, one.reduce_input)
        assert (other.gathered * 2, other.compute_shard * 2, one.compute_shard) == (one.gathered, one.params, 0)


def test_gathered_bytes_of_fsdp2_include_buffers_and_prefetch():
    """In backward a layer's parameters, the buffer of the next all-gather and of the last reduce-scatter are held."""
    found = at(estimate(2, mixed_precision="bf16", device="cuda"), "backward of model.layers.3")
    reduced = LAYER * 4
    # at the reduction: the prefetched buffer in bf16, input and output in fp32; the parameters are freed
    assert found["gathered"] == LAYER * 2 + reduced + reduced // 2
    none = at(
        estimate(2, mixed_precision="bf16", device="cuda", backward_prefetch="NO_PREFETCH"),
        "backward of model.layers.3",
    )
    assert none["gathered"] in (reduced + reduced // 2, reduced + LAYER * 2, reduced + 2 * LAYER * 2)


def test_units_that_are_not_freed_stay_gathered():
    freed, kept = (
        at(estimate(2, strategy=strategy, device="cuda"), f"forward of model.layers.{LAYERS - 1}")["gathered"]
        for strategy in ("full_shard", "shard_grad_op")
    )
    assert kept - freed == (EMBEDDING + (LAYERS - 1) * LAYER) * 4


def test_accumulation_keeps_whole_gradients_without_sync():
    options = {"mixed_precision": "bf16", "device": "cuda"}
    kept = at(estimate(2, workload={"accumulation": 2}, **options), "forward of model.layers.0")
    synced = at(
        estimate(2, workload={"accumulation": 2, "sync_each_batch": True}, **options), "forward of model.layers.0"
    )
    assert kept["grads"] == TOTAL * 4  # in the dtype of the reduction
    assert synced["grads"] == TOTAL // 2 * 4


def test_offload_moves_states_to_the_host():
    found = estimate(2, device="cuda", offload_params=True)
    assert found.host_bytes >= 4 * (TOTAL // 2 * 4)
    end = at(found, "clipping")
    assert (end["params"], end["grads"], end["optimizer"]) == (0, 0, 0)


@pytest.mark.parametrize("version", [1, 2])
def test_offloaded_state_is_on_the_device_in_windows(version, monkeypatch):
    monkeypatch.setattr(offloaded_steps, "WINDOW", 4096)
    plain, found = (estimate(2, version=version, device="cuda", offload_optimizer=on) for on in (False, True))
    state = at(plain, "clipping")["optimizer"]
    assert at(found, "clipping")["optimizer"] == 0 and at(found, "clipping")["params"] > 0
    assert found.offload_bytes - found.rounding_bytes == state
    windows = at(found, "optimizer step")["other"] - at(found, "clipping")["other"]
    assert 2 * 4096 < windows < state / 2
    on_cpu = estimate(2, version=version, offload_optimizer=True)
    assert at(on_cpu, "clipping")["optimizer"] == state and "no effect" in " ".join(on_cpu.assumptions)


@pytest.mark.parametrize(("version", "pins"), [(1, True), (2, True), (2, False)])
def test_offload_counts_the_rounding_of_pinned_memory(version, pins):
    options = {} if pins else {"pin_memory": False}
    found = estimate(2, version=version, device="cuda", offload_params=True, **options)
    plan = plan_of(2, version=version, device="cuda", offload_params=True, **options)
    units = unit_bytes(plan, llama())
    tensors = [unit.params for unit in units]
    if version == 2:
        tensors = [shard.numel * 4 for unit in units for shard in unit.shards]
    rounded = sum(1 << ceil(log2(size)) for size in tensors if size) if pins else sum(tensors)
    assert found.rounding_bytes == 2 * (rounded - sum(tensors))
    state = state_bytes("adamw", [shard for unit in units for shard in unit.shards])
    assert found.offload_bytes == 2 * rounded + state  # parameters and gradients


@pytest.mark.parametrize("version", [1, 2])
def test_copies_of_asynchronous_saves_are_counted(version):
    assert estimate(2, version=version).staging_bytes == 0
    num_tensors = LAYERS * 9 + 3
    buffers = sum(buffer.nbytes for buffer in llama().buffers())
    found = estimate(2, version=version, async_save=True).staging_bytes
    assert found == pytest.approx(TOTAL // 2 * 4 * 3 + buffers, abs=4 * num_tensors)
    replicated = estimate(4, version=version, strategy="hybrid_shard", async_save=True).staging_bytes
    assert replicated == pytest.approx(found / 2, abs=4)
    assert estimate(2, version=version, strategy="no_shard", async_save=True).staging_bytes == pytest.approx(
        found, abs=512
    )


def test_checkpointing_saves_the_input_of_each_layer_only():
    options = {"micro_batch": 4, "seq_len": 64, "device": "cuda", "mixed_precision": "bf16"}
    hidden = 4 * 64 * HIDDEN * 2
    first, last = (
        at(estimate(2, activation_checkpointing="full", **options), f"forward of model.layers.{index}")["activations"]
        for index in (1, LAYERS - 2)
    )
    assert last - first == (LAYERS - 3) * hidden
    offloaded = estimate(2, activation_checkpointing="full", activation_checkpointing_offload=True, **options)
    assert offloaded.host_bytes >= LAYERS * hidden


def test_eager_attention_keeps_the_matrix_of_weights():
    sdpa, eager = (
        at(estimate(2, 1, 64, workload={"attention": attention}), f"forward of model.layers.{LAYERS - 1}")[
            "activations"
        ]
        for attention in ("sdpa", "eager")
    )
    assert eager - sdpa > (LAYERS - 1) * HEADS * 64 * 64 * 4
    assert estimate(2, 1, 64).peak == estimate(2, 1, 64, workload={"attention": "flash_attention_2"}).peak


def test_model_is_unchanged_by_an_estimate():
    model = llama()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    estimate(2, mixed_precision="bf16", activation_checkpointing="full")
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_optimizer_states_follow_their_sources():
    shards = [shard for unit in unit_bytes(plan_of(2), llama()) for shard in unit.shards]
    elements, tensors = TOTAL // 2, LAYERS * 9 + 3
    assert state_bytes("adamw", shards) == 8 * elements + 4 * tensors
    assert state_bytes("sgd", shards) == 0
    rows = LAYERS * (4 * 2 * HIDDEN + 3 * (HIDDEN + INNER)) + 2 * (VOCAB + HIDDEN)
    vectors = (2 * LAYERS + 1) * HIDDEN
    assert state_bytes("adafactor", shards) == 4 * (rows + vectors)
    assert state_bytes("muon", shards) == 4 * (elements - vectors // 2) + (8 * vectors // 2) + 4 * (2 * LAYERS + 1)
    small, large = (
        ParameterShard(shape=(size,), whole=(size,), numel=size, dtype=torch.float32, trainable=True)
        for size in (4095, 4097)
    )
    assert state_bytes("adamw_8bit", [small]) - state_bytes("adamw_8bit", []) == 8 * 4095
    assert state_bytes("adamw_8bit", [large]) - state_bytes("adamw_8bit", []) == 2 * (4097 + 17 * 4)


def test_update_temporaries_follow_the_loop():
    shards = [shard for unit in unit_bytes(plan_of(2), llama()) for shard in unit.shards]
    loops = {loop: update_bytes(Workload(micro_batch=1, seq_len=1, update_loop=loop), plan_of(2), shards) for loop in
             ("fused", "foreach", "for_loop")}  # fmt: skip
    assert loops["fused"] == 0 and loops["foreach"] == TOTAL // 2 * 4
    # square root and quotient of the head, and the quotient of the norm before it
    assert loops["for_loop"] == 2 * (VOCAB * HIDDEN // 2 * 4) + HIDDEN // 2 * 4


def test_frozen_parameters_have_no_gradients_and_states():
    model = hf.LlamaForCausalLM(llama().config).to("meta")
    model.model.layers.requires_grad_(False)
    end = at(estimate(2, model=model), "clipping")
    assert end["grads"] == (EMBEDDING + HEAD) // 2 * 4
    assert end["params"] == TOTAL // 2 * 4


@QUICK
@given(
    version=st.sampled_from([1, 2]),
    strategy=st.sampled_from(STRATEGIES),
    precision=st.sampled_from(["no", "bf16"]),
    accumulation=st.sampled_from([1, 3]),
    prefetch=st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]),
)
def test_kinds_add_up_and_everything_is_freed(version, strategy, precision, accumulation, prefetch):
    found = estimate(
        4, version=version, strategy=strategy, mixed_precision=precision, backward_prefetch=prefetch,
        workload={"accumulation": accumulation},
    )  # fmt: skip
    for moment in (found.peak, *found.timeline):
        assert moment.bytes == sum(moment.bytes_by_kind[kind] for kind in MEMORY_KINDS)
        assert min(moment.bytes_by_kind.values()) >= 0
    assert found.peak.bytes >= max(moment.bytes for moment in found.timeline)
    end = at(found, "clipping")
    assert end["gathered"] == 0 and end["activations"] <= 4 * accumulation  # the losses


@QUICK
@given(ranks=st.integers(1, 40), more=st.integers(1, 40), version=st.sampled_from([1, 2]))
def test_more_ranks_never_have_larger_shards(ranks, more, version):
    few, many = (
        sum(unit.params for unit in unit_bytes(plan_of(count, version), llama())) for count in (ranks, ranks + more)
    )
    assert many <= few and few * ranks >= TOTAL * 4


def test_estimate_of_70b_parameters_takes_under_a_second():
    config = hf.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config)
    plan = plan_of(512, model=model, device="cuda", mixed_precision="bf16", activation_checkpointing="full")
    start = time.process_time()
    found = estimate_memory(plan, model, Workload(micro_batch=1, seq_len=4096))
    assert time.process_time() - start < 1
    assert 10 << 30 < found.peak.bytes < 80 << 30
