"""Traced steps of small models, against sums by hand. tests/gloo/test_memory_error.py compares them with real ranks."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import nn

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.resolve import resolve
from hf_fsdp_plugin.problems import SpecError
from hf_fsdp_plugin.spec.load import load_spec
from hf_fsdp_plugin.tools.plan.estimate.memory.peak import estimate_memory
from hf_fsdp_plugin.tools.plan.estimate.types import MemoryEstimate, Moment, Workload
from hf_fsdp_plugin.torch_private.fsdp2 import installed_behavior
from scripts.bench.traced_memory import CannotTrace, TracedMemory, trace_memory
from scripts.bench.traced_memory.private import fake_process_group

STEP = Workload(micro_batch=2, seq_len=4, update_loop="for_loop", clip_norm=False)


class Linear(nn.Module):
    """One 6x4 matrix, which is the root unit."""

    main_input_name = "input_ids"
    config = SimpleNamespace(use_cache=False)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 4))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (input_ids.float() @ self.weight.T).sum()}


def plan_of(model: nn.Module, world_size: int = 2, device: str = "cpu", **fsdp: Any) -> FsdpPlan:
    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "NO_WRAP", **fsdp}
    spec = load_spec({"distributed_type": "FSDP", "mixed_precision": "no", "fsdp_config": fsdp})
    return resolve(spec, model, world_size=world_size, device_type=device)


def llama(layers: int = 2) -> nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    with torch.device("meta"):
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_hidden_layers=layers, use_cache=False))


def largest(timeline: Iterable[Moment]) -> dict[str, int]:
    """Return place -> the most bytes of all its moments."""
    found: dict[str, int] = {}
    for moment in timeline:
        found[moment.where] = max(moment.bytes, found.get(moment.where, 0))
    return found


def at(estimate: TracedMemory | MemoryEstimate, where: str) -> dict[str, int]:
    """Return the bytes of the kinds that are not 0 at a place."""
    (moment,) = (moment for moment in estimate.timeline if moment.where == where)
    return {kind: size for kind, size in moment.bytes_by_kind.items() if size}


@pytest.mark.parametrize(("loop", "temporaries"), [("for_loop", 2), ("foreach", 1), ("fused", 0)])
def test_step_of_one_matrix_equals_sum_by_hand(loop: Any, temporaries: int):
    model = Linear()
    estimate = trace_memory(plan_of(model), model, replace(STEP, update_loop=loop))
    shard, whole = 3 * 4 * 4, 6 * 4 * 4
    kept = {"params": shard, "optimizer": 2 * shard + 4}  # AdamW's averages and its step
    ids, inputs, output, scalar = 2 * 4 * 8, 2 * 4 * 4, 2 * 6 * 4, 4
    # FSDP2 keeps the output of an all-gather, from which the parameter was copied, until the end of the forward.
    forward = {"activations": ids + inputs + output + scalar, "gathered": 2 * whole}
    assert at(estimate, "forward of Linear") == {**kept, **forward}
    # The reduce-scatter: the input and its copy by gloo, and the shard. Scalars: loss and gradients. Before torch 2.15,
    # the whole gradient too.
    gradient = whole if installed_behavior().keeps_last_gradient else 0
    backward = {"grads": shard, "activations": ids + gradient + 3 * scalar, "gathered": 2 * whole}
    assert at(estimate, "backward of Linear") == {**kept, **backward}
    # One parameter at a time: the root of the second average, and its quotient. All at once: the root.
    update = {"grads": shard, **({"other": temporaries * shard} if temporaries else {})}
    assert at(estimate, "optimizer step") == {**kept, **update}
    assert estimate.peak.bytes == max(sum({**kept, **way}.values()) for way in (forward, backward, update))


def test_model_and_process_are_unchanged():
    model = llama()
    names = [name for name, _ in model.named_parameters()]
    trace_memory(plan_of(model), model, STEP)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not dist.is_initialized()


@pytest.mark.parametrize("version", [1, 2])
def test_traced_memory_is_near_the_closed_form(version: int):
    model = llama()
    plan = plan_of(model, 4, fsdp_version=version, fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    step = replace(STEP, seq_len=64, accumulation=2)
    traced, closed = trace_memory(plan, model, step), estimate_memory(plan, model, step)
    assert abs(traced.peak.bytes / closed.peak.bytes - 1) < 0.05
    units = {f"{way} of model.layers.{index}" for way in ("forward", "backward") for index in (0, 1)}
    assert units < {moment.where for moment in traced.timeline}
    assert traced.peak.bytes == max(moment.bytes for moment in traced.timeline)


def test_offload_moves_shards_and_state_to_the_host():
    model = llama()
    on_device = trace_memory(plan_of(model, device="cuda"), model, STEP)
    offloaded = trace_memory(plan_of(model, device="cuda", fsdp_offload_params=True), model, STEP)
    kinds = on_device.peak.bytes_by_kind
    assert on_device.host_bytes == 0
    assert {kind: offloaded.peak.bytes_by_kind[kind] for kind in ("params", "grads", "optimizer")} == {
        "params": 0, "grads": 0, "optimizer": 0,
    }  # fmt: skip
    assert offloaded.host_bytes >= kinds["params"] + kinds["optimizer"]


def test_fsdp1_keeps_offloaded_gradients_on_device_in_backward():
    model = llama()
    settings = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_offload_params": True}
    plan = plan_of(model, device="cuda", fsdp_version=1, **settings)
    traced = trace_memory(plan, model, STEP)
    first, last = model.get_submodule("model.layers").children()
    for done, where in (([last], "backward of model.layers.0"), ([first, last], "backward of LlamaForCausalLM")):
        shards = 4 * sum(p.numel() for layer in done for p in layer.parameters()) // 2
        assert max(m.bytes_by_kind["grads"] for m in traced.timeline if m.where == where) >= shards
    assert at(traced, "optimizer step").get("grads", 0) == 0


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_both_methods_agree_about_offload(version: int, strategy: str):
    model = llama(4)
    settings = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_sharding_strategy": strategy}
    plan = plan_of(model, device="cuda", fsdp_version=version, fsdp_offload_params=True, **settings)
    step = replace(STEP, accumulation=2)
    traced, closed = (method(plan, model, step).peak for method in (trace_memory, estimate_memory))
    workspace = 32 << 20
    assert abs((traced.bytes - workspace) / (closed.bytes - workspace) - 1) < 0.06  # blocks of 512 bytes


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("backward", ["BACKWARD_PRE", "BACKWARD_POST"])
def test_both_methods_prefetch_units_inside_units_alike(version: int, backward: str):
    model = llama(4)
    nested = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_forward_prefetch": True}
    nested["fsdp_transformer_layer_cls_to_wrap"] = "LlamaDecoderLayer,LlamaMLP"
    plan = plan_of(model, 4, fsdp_version=version, fsdp_backward_prefetch=backward, **nested)
    step = replace(STEP, micro_batch=1)
    traced, closed = (largest(method(plan, model, step).timeline) for method in (trace_memory, estimate_memory))
    inner = [f"{way} of model.layers.{index}.mlp" for way in ("forward", "backward") for index in (0, 1, 2)]
    assert [closed[where] for where in inner] == pytest.approx([traced[where] for where in inner], rel=0.001)
    assert max(closed.values()) == pytest.approx(max(traced.values()), rel=0.001)


@pytest.mark.parametrize("version", [1, 2])
def test_both_methods_free_each_new_gradient_that_autograd_adds(version: int):
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 64}
    with torch.device("meta"):
        model = hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, **experts, num_hidden_layers=3, use_cache=False))
    late = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_backward_prefetch": "BACKWARD_POST"}
    plan = plan_of(model, 4, fsdp_version=version, **late)
    step = replace(STEP, seq_len=16, accumulation=2, sync_each_batch=False)
    traced, closed = (method(plan, model, step).peak for method in (trace_memory, estimate_memory))
    assert closed.bytes == pytest.approx(traced.bytes, rel=0.005)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_adafactor_gathers_only_sharded_parameters(strategy: str):
    model = llama()
    plan = plan_of(model, 4, fsdp_sharding_strategy=strategy)
    step = replace(STEP, optimizer="adafactor")
    traced, closed = (at(method(plan, model, step), "optimizer step") for method in (trace_memory, estimate_memory))
    assert closed["other"] == pytest.approx(traced["other"], rel=0.1)


def test_dropout_mask_has_one_byte_on_gpus():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.device("meta"):
        model = hf.BertForMaskedLM(hf.BertConfig(**sizes, vocab_size=64))
    step = replace(STEP, micro_batch=16, seq_len=256)
    cpu, cuda = (trace_memory(plan_of(model, device=device), model, step) for device in ("cpu", "cuda"))
    # Four heads: the CPU keeps matrices of 256x256 weights, since its kernel does not support dropout.
    assert cuda.peak.bytes_by_kind["activations"] < cpu.peak.bytes_by_kind["activations"] / 2


def test_trace_inside_a_process_group_is_refused():
    model = llama()
    with fake_process_group(2), pytest.raises(CannotTrace, match="rank of a run"):
        trace_memory(plan_of(model), model, STEP)


def test_model_that_reads_values_cannot_be_traced():
    class Reads(Linear):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return super().forward(input_ids * int(input_ids.sum()), labels)

    model = Reads()
    with pytest.raises(CannotTrace, match="Reads cannot be traced"):
        trace_memory(plan_of(model), model, STEP)
    assert not dist.is_initialized()


def test_optimizer_that_the_backend_refuses_is_refused():
    model = llama()
    with pytest.raises(SpecError) as caught:
        trace_memory(plan_of(model, fsdp_version=1), model, replace(STEP, optimizer="adafactor"))
    assert [problem.code for problem in caught.value.problems] == ["FSDP-E320"]


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_70b_model_on_512_ranks_is_traced_in_a_minute(version: int):
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, vocab_size=128256, num_hidden_layers=80, use_cache=False))
    settings = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_activation_checkpointing": True}
    plan = plan_of(model, 512, fsdp_version=version, **settings)
    start = time.process_time()
    estimate = trace_memory(plan, model, replace(STEP, micro_batch=1, seq_len=2048))
    assert time.process_time() - start < 60
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8 << 20  # KiB
    assert {f"backward of model.layers.{index}" for index in range(80)} < {each.where for each in estimate.timeline}
