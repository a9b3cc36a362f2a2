"""Time of a step: collectives and schedules computed by hand, properties, and bad input."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.tools.plan.estimate.machines import (
    Link,
    Machine,
    MeasuredCollective,
    interpolate,
    machine_named,
    read_machine,
    seconds_at,
)
from hf_fsdp_plugin.tools.plan.estimate.memory.meta_pass import profile_step
from hf_fsdp_plugin.tools.plan.estimate.schedule import UnitTimes, exposed_seconds, simulate
from hf_fsdp_plugin.tools.plan.estimate.time import TimeModel, collective_seconds, estimate_communication, unit_costs
from hf_fsdp_plugin.tools.plan.estimate.types import Workload
from scripts.bench.calibration import write_machine
from tests.support.matrices import needs_transformers

STEP = Workload(micro_batch=2, seq_len=32)
H100 = machine_named("h100-sxm")
KNOWN_MACHINES = ("a100-40gb", "a100-80gb", "h100-sxm", "h100-pcie", "h100-96gb-500w", "h200", "b200")


@cache
def llama(**sizes):
    defaults = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 128}
    config = LlamaConfig(**{**defaults, **sizes}, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def planned(model, world=8, strategy="full_shard", version=2, **settings):
    config = {
        "distributed_type": "FSDP", "num_processes": world, "mixed_precision": "bf16",
        "fsdp_config": {
            "fsdp_version": version, "fsdp_sharding_strategy": strategy.upper(),
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **settings,
        },
    }  # fmt: skip
    return resolve(load_spec(config, environ={}), model, world_size=world, device_type="cuda")


@cache
def planned_llama():
    return planned(llama())


def with_prefetch(plan, backward):
    return replace(plan, prefetch=replace(plan.prefetch, backward=backward))


def test_ring_is_latency_plus_bytes_over_bandwidth():
    machine = Machine(
        name="m", device="d", ranks_per_machine=4, peak={"bf16": 1e12}, memory_bandwidth=1e12, memory_bytes=1e10,
        intra=Link(bandwidth=100e9, latency=1e-6), inter=Link(bandwidth=10e9, latency=10e-6), host_bandwidth=1e10,
    )  # fmt: skip
    # 3 steps of 1 us, and 3/4 of 4 GB over 100 GB/s.
    assert machine.collective_seconds("all_gather", 4, 4 * 10**9, 1) == pytest.approx(8.4e-6 + 3e-6 + 0.03)
    assert machine.collective_seconds("all_reduce", 4, 4 * 10**9, 1) == pytest.approx(8.4e-6 + 6e-6 + 0.06)
    # 8 ranks on 2 machines: 6 steps inside and 1 between; the slower side is 4 cards of 9 GB/s.
    assert machine.collective_seconds("all_gather", 8, 8 * 10**9, 2) == pytest.approx(8.4e-6 + 16e-6 + 7 / 36)
    assert machine.collective_seconds("all_gather", 1, 10**9, 1) == 0


def test_gathers_overlap_with_computation():
    units = [UnitTimes(name=str(at), forward=2.0, backward=4.0, gather_forward=1.0, gather_backward=1.0, reduce=1.0)
             for at in range(3)]  # fmt: skip
    plan = planned_llama()
    timeline = simulate(units, plan, STEP, overlaps=True, tail=0.0)
    # Only the first all-gathers of forward and backward, and the last reduce-scatter, are not overlapped.
    assert max(span.end for span in timeline.spans) == 1 + 6 + 1 + 12 + 1
    assert exposed_seconds(timeline) == 3
    without = simulate(units, with_prefetch(plan, "none"), STEP, overlaps=True, tail=0.0)
    assert max(span.end for span in without.spans) > max(span.end for span in timeline.spans)
    serial = simulate(units, plan, STEP, overlaps=False, tail=0.0)
    assert max(span.end for span in serial.spans) == 18 + 9


@given(
    st.lists(st.tuples(*[st.floats(0, 5)] * 5), min_size=1, max_size=5),
    st.sampled_from(["pre", "post", "none"]),
    st.integers(1, 3),
)
def test_step_is_between_computation_and_the_sum(rows, prefetch, micro_batches):
    units = [
        UnitTimes(name=str(at), forward=f, backward=b, gather_forward=g, gather_backward=g, reduce=r, all_reduce=a)
        for at, (f, b, g, r, a) in enumerate(rows)
    ]
    workload = replace(STEP, accumulation=micro_batches, sync_each_batch=True)
    timeline = simulate(units, with_prefetch(planned_llama(), prefetch), workload, overlaps=True, tail=1.0)
    end = max(span.end for span in timeline.spans)
    compute = sum(span.end - span.start for span in timeline.spans if span.stream == "compute")
    communication = sum(span.end - span.start for span in timeline.spans if span.stream != "compute")
    assert compute - 1e-9 <= end <= compute + communication + 1e-9
    assert -1e-9 <= exposed_seconds(timeline) <= communication + 1e-9
    assert end == pytest.approx(compute + exposed_seconds(timeline))


def test_products_are_counted_exactly():
    model = llama(num_hidden_layers=6)
    costs = TimeModel(planned(model), model, STEP).costs
    tokens = STEP.micro_batch * STEP.seq_len
    per_token = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96)
    attention = 2 * STEP.micro_batch * 32 * 32 * 64  # two products of S x S x hidden, halved by the causal mask
    layer = costs["model.layers.3"]
    assert sum(c.flops * n for c, n in layer.forward.items() if c.kind == "matmul") == per_token * tokens
    assert sum(c.flops * n for c, n in layer.backward.items() if c.kind == "matmul") == 2 * per_token * tokens
    assert sum(c.flops * n for c, n in layer.forward.items() if c.kind == "attention") == attention
    assert layer == costs["model.layers.1"]
    assert sum(c.flops * n for c, n in costs["model.norm + lm_head"].forward.items()) == 2 * 64 * 128 * tokens


def test_checkpointed_units_inside_layers_run_again():
    model = llama(num_hidden_layers=6)
    seconds = [
        TimeModel(planned(model, fsdp_activation_checkpointing=True, **wrap), model, STEP)
        .estimate(H100)
        .compute_seconds
        for wrap in ({}, {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer,LlamaMLP"})
    ]
    assert seconds[1] >= seconds[0] * (1 - 1e-9)


def test_experts_are_counted_by_routed_tokens():
    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    costs = TimeModel(planned(model), model, STEP).costs["model.layers.0"]
    flops = {c.flops for c in costs.forward if c.kind == "matmul"}
    tokens = STEP.micro_batch * STEP.seq_len
    assert {2 * 32 * 96 * tokens * 2, 2 * 48 * 32 * tokens * 2} <= flops


def test_dispatch_of_tokens_to_experts_is_counted():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    traffic = {}
    for top_k in (1, 2):
        with torch.device("meta"):
            config = MixtralConfig(**sizes, vocab_size=64, num_local_experts=4, num_experts_per_tok=top_k)
            model = MixtralForCausalLM(config)
        forward = TimeModel(planned(model), model, STEP).costs["model.layers.0"].forward
        traffic[top_k] = sum(c.bytes * n for c, n in forward.items() if not c.flops)
    routed = STEP.micro_batch * STEP.seq_len * 32 * 2  # bytes of the hidden states of a token and an expert, in bf16
    # They are gathered, multiplied by their weights, put back in order, and added.
    assert traffic[2] - traffic[1] >= 4 * routed


def test_throughput_follows_power_and_length_of_samples():
    capped = replace(H100, power=H100.power / 4)
    assert capped.throughput("matmul", "bf16", 1e12) == pytest.approx(H100.throughput("matmul", "bf16", 1e12) / 2)
    assert capped.throughput("memory", "bf16", 1e9) == H100.throughput("memory", "bf16", 1e9)
    short, long = (H100.throughput("attention", "bf16", 1e12, length) for length in (400, 10**9))
    assert short == pytest.approx(long / 2)
    assert H100.throughput("fused", "bf16", 1e9) == pytest.approx(H100.throughput("memory", "bf16", 1e9) / H100.fusion)


def test_slow_host_and_contention_lengthen_the_step():
    model = TimeModel(planned(llama()), llama(), STEP)
    base = model.estimate(replace(H100, contention=0.0))
    slow = model.estimate(replace(H100, contention=0.0, op_seconds=1.0))
    assert slow.step_seconds > 100 > base.step_seconds
    half = model.estimate(replace(H100, contention=0.5))
    overlapped = base.communication_seconds - base.exposed_seconds
    assert half.step_seconds == pytest.approx(base.step_seconds + overlapped / 2)


@pytest.mark.parametrize("name", KNOWN_MACHINES)
def test_every_machine_gives_an_estimate(name):
    model = llama()
    estimate = TimeModel(planned(model), model, STEP).estimate(machine_named(name))
    assert estimate.step_seconds > 0
    if estimate.low_seconds is not None:
        assert estimate.low_seconds <= estimate.step_seconds <= estimate.high_seconds
    assert 0 <= estimate.exposed_seconds <= estimate.communication_seconds
    assert estimate.mfu is not None and 0 < estimate.mfu < 1


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard", "hybrid_shard"])
@pytest.mark.parametrize("version", [1, 2])
def test_more_ranks_communicate_longer(strategy, version):
    model = llama(num_hidden_layers=3)
    plans = [planned(model, world, strategy, version) for world in (8, 64, 4096)]
    costs = unit_costs(plans[0], profile_step(plans[0], model, STEP))
    seconds = [TimeModel(plan, model, STEP, costs).estimate(H100).communication_seconds for plan in plans]
    assert seconds == sorted(seconds)


def test_checkpointing_adds_a_forward():
    model = llama(hidden_size=1024, intermediate_size=4096)
    workload = Workload(micro_batch=4, seq_len=2048)
    plain = TimeModel(planned(model), model, workload).estimate(H100)
    recomputed = TimeModel(planned(model, fsdp_activation_checkpointing=True), model, workload).estimate(H100)
    assert 1.1 < recomputed.compute_seconds / plain.compute_seconds < 1.5


def test_slower_network_is_not_faster():
    model = llama()
    times = TimeModel(planned(model, 64), model, STEP)
    seconds = [
        times.estimate(machine_named(f"h100-sxm:{name}")).step_seconds
        for name in ("ndr", "hdr", "efa-400", "ethernet-100", "ethernet-25")
    ]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("name", ["h100", "h100-sxm:wifi", "tpu"])
def test_unknown_machine_is_refused(name):
    with pytest.raises(SpecError) as caught:
        machine_named(name)
    assert [problem.code for problem in caught.value.problems] == ["FSDP-E830"]


def test_machine_file_is_read_as_written(tmp_path):
    curves = {"matmul.fp32": ((1.0, 2.0), (3.0, 4.0))}
    collectives = (MeasuredCollective(kind="all_gather", group_size=2, seconds=((4.0, 1.0),)),)
    machine = Machine(**{**{f: getattr(H100, f) for f in H100.__slots__}, "curves": curves, "collectives": collectives})
    write_machine(machine, tmp_path / "m.json")
    assert read_machine(tmp_path / "m.json") == machine
    assert machine_named(str(tmp_path / "m.json")) == machine


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"curves": 1}'])
def test_damaged_machine_file_is_refused(tmp_path, content):
    path = tmp_path / "m.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SpecError) as caught:
        machine_named(str(path))
    assert [problem.code for problem in caught.value.problems] == ["FSDP-E831"]


def test_model_without_a_loss_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    plan = planned(model, fsdp_auto_wrap_policy="NO_WRAP")
    with pytest.raises(SpecError) as caught:
        TimeModel(plan, model, STEP).estimate(H100)
    assert [problem.code for problem in caught.value.problems] == ["FSDP-E811"]


def test_context_axis_divides_the_tokens_of_a_rank():
    """The shards are those of data parallelism on as many ranks."""
    model = llama()
    alone, divided = (planned(model, world=4, **axes) for axes in ({}, {"cp_size": 2}))
    one, half = (TimeModel(plan, model, STEP) for plan in (alone, divided))
    assert divided.mesh.num_shards == alone.mesh.num_shards == 4
    first, second = (
        sum(op.flops * n for op, n in each.costs["model.layers.0"].forward.items()) for each in (one, half)
    )
    assert second < 0.6 * first
    assert half.estimate(H100).tokens_per_second < 1.1 * one.estimate(H100).tokens_per_second


def mixtral():
    config = MixtralConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=4, num_local_experts=4, vocab_size=128, use_cache=False)  # fmt: skip
    with torch.device("meta"):
        return MixtralForCausalLM(config)


@needs_transformers("5.20")
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"ep_size": 2}, {"cp_size": 2, "tp_size": 2}], ids=str)
def test_layers_wait_for_collectives_of_axes(sizes):
    """The links are so slow that the collectives take almost all of the time."""
    model = mixtral()
    slow = replace(H100, intra=replace(H100.intra, bandwidth=1e3))
    times = TimeModel(planned(model, world=4, **sizes), model, STEP)
    calls = list(estimate_communication(planned(model, world=4, **sizes), model, STEP))
    axes = {name: [call for call in calls if call.axis == name] for name in ("context", "tensor", "expert")}
    full = {"cp_size": "context", "tp_size": "tensor", "ep_size": "expert"}
    assert {name for name, found in axes.items() if found} == {full[name] for name in sizes}
    in_layers = sum(
        call.bytes * call.calls * (2 if call.kind == "all_reduce" else 1) / 2 / 1e3
        for found in axes.values()
        for call in found
        if call.phase in ("forward", "backward")
    )
    spans = times.timeline(slow).spans
    exchanged = sum(span.end - span.start for span in spans if span.stream == "axes")
    assert exchanged == pytest.approx(in_layers, rel=0.01)
    compute = [(span.start, span.end) for span in spans if span.stream == "compute"]
    waits = [(span.start, span.end) for span in spans if span.stream == "axes"]
    assert not any(a < d and c < b for a, b in compute for c, d in waits)


@needs_transformers("5.19")
def test_tensor_axis_is_placed_inside_a_machine():
    model = mixtral()
    call = next(
        call
        for call in estimate_communication(planned(model, world=8, tp_size=2), model, STEP)
        if call.axis == "tensor"
    )
    inside, across = (replace(H100, ranks_per_machine=ranks) for ranks in (2, 1))
    plan = planned(model, world=8, tp_size=2)
    assert collective_seconds(call, plan, inside) < collective_seconds(call, plan, across)


def test_mesh_that_shards_nothing_is_not_predicted():
    model = mixtral()
    with pytest.raises(SpecError) as caught:
        TimeModel(planned(model, world=4, tp_size=4), model, STEP)
    assert [problem.code for problem in caught.value.problems] == ["FSDP-E813"]


@needs_transformers("5.20")
def test_model_and_process_are_unchanged_by_axes():
    model = mixtral()
    before = {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()}
    TimeModel(planned(model, world=4, ep_size=4), model, STEP)
    assert {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()} == before
    assert not any("forward" in vars(module) for module in model.modules())
    assert not dist.is_initialized()


def test_curves_are_linear_between_points():
    curve = ((10.0, 1.0), (20.0, 3.0))
    assert [interpolate(curve, size) for size in (1, 15, 99)] == [1.0, 2.0, 3.0]
    assert seconds_at(curve, 40) == 6.0


def test_name_of_several_machines_lists_them():
    with pytest.raises(SpecError) as caught:
        machine_named("h100")
    assert "h100-sxm or h100-pcie" in caught.value.problems[0].fix
