"""What a GPU holds besides the allocated peak: workspaces, NCCL, context, and what torch's allocator reserves."""

from dataclasses import replace

import pytest
import torch
import transformers as hf

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.tools.plan.estimate.machines import machine_named
from hf_fsdp_plugin.tools.plan.estimate.memory.peak import (
    communicator_sizes,
    estimate_memory,
    framework_bytes,
    nccl_bytes,
    num_channels,
    workspace_bytes,
)
from hf_fsdp_plugin.tools.plan.estimate.time import estimate_communication
from hf_fsdp_plugin.tools.plan.estimate.types import Workload, update_loop
from hf_fsdp_plugin.tools.plan.output import Planned, Prediction, plan_json, plan_text

MIB = 1 << 20
STEP = Workload(micro_batch=1, seq_len=64)


def llama():
    sizes = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    with torch.device("meta"):
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_hidden_layers=3))


def plan_of(model, ranks=8, strategy="full_shard", device="cuda", version=2, **config):
    config = {"version": version, **config}
    spec = hfp.load_spec(fsdp=f"{strategy} auto_wrap", fsdp_config=config)
    return hfp.resolve(spec, model, world_size=ranks, device_type=device)


@pytest.mark.parametrize(
    ("capability", "size"),
    [(8.0, 8 * MIB + 128 * 1024), (8.9, 8 * MIB + 128 * 1024), (9.0, 32 * MIB), (10.0, 32 * MIB), (None, 32 * MIB)],
)
def test_workspaces_follow_the_compute_capability(capability, size):
    machine = replace(machine_named("h100-sxm"), capability=capability)
    assert workspace_bytes("cuda", machine) == size and framework_bytes("cuda", machine) == 2 * size
    assert workspace_bytes("cuda") == 32 * MIB


def test_other_devices_have_no_workspaces():
    assert framework_bytes("cpu") == framework_bytes("npu") == 0


def test_known_machines_tell_capability_and_links():
    slow, fast = machine_named("h100-pcie:ethernet-25"), machine_named("a100-80gb")
    assert (fast.capability, slow.capability, machine_named("b200").capability) == (8.0, 9.0, 10.0)
    assert num_channels(fast) == num_channels(None) > num_channels(slow)
    assert num_channels(replace(slow, capability=None)) == num_channels(None)


@pytest.mark.parametrize(
    ("ranks", "strategy", "config", "groups"),
    [
        (1, "full_shard", {}, ()),
        (8, "full_shard", {}, (8,)),
        (8, "shard_grad_op", {}, (8,)),
        (8, "hybrid_shard", {"dp_shard_size": 2}, (8, 4, 2)),
        (8, "no_shard", {}, (8, 8)),
    ],
)
def test_communicators_are_those_of_the_mesh(ranks, strategy, config, groups):
    assert communicator_sizes(plan_of(llama(), ranks, strategy, **config)) == groups


@pytest.mark.parametrize(("ranks", "published"), [(2, 544e6), (4, 688e6)])
def test_nccl_is_near_the_published_measurement(ranks, published):
    """NVIDIA/nccl issue 964: one communicator of A100 with NVLink, in MB, taken as the MiB of nvidia-smi."""
    found = nccl_bytes(plan_of(llama(), ranks), machine_named("a100-80gb"))
    assert found == pytest.approx(published * 1.048576, rel=0.06)


def test_slow_links_need_fewer_channels():
    plan = plan_of(llama())
    assert nccl_bytes(plan, machine_named("h100-pcie:ethernet-25")) == nccl_bytes(plan) / 6


@pytest.mark.parametrize(
    ("optimizer", "device", "loop"),
    [
        ("adamw", "cuda", "fused"), ("sgd", "cuda", "foreach"), ("muon", "cuda", "foreach"),
        ("adamw", "npu", "foreach"),
        ("adamw", "cpu", "for_loop"),
    ],
)  # fmt: skip
def test_default_of_the_update_is_the_trainers(optimizer, device, loop):
    workload = replace(STEP, optimizer=optimizer)
    assert update_loop(workload, device) == loop
    assert update_loop(replace(workload, update_loop="for_loop"), device) == "for_loop"


def test_fused_updates_have_no_copy_of_the_shard():
    model = llama()
    plan = plan_of(model, ranks=1)
    found = {loop: estimate_memory(plan, model, replace(STEP, update_loop=loop)) for loop in (None, "fused", "foreach")}
    shard = sum(parameter.numel() for parameter in model.parameters()) * 4
    last = {loop: estimate.timeline[-1].bytes for loop, estimate in found.items()}
    assert last[None] == last["fused"] == last["foreach"] - shard
    assert any("adamw_torch_fused" in text for text in found[None].assumptions)
    assert not any("adamw_torch_fused" in text for text in found["fused"].assumptions)


def test_only_gpus_of_cuda_have_figures_of_the_device():
    model = llama()
    cpu, xpu, cuda = (estimate_memory(plan_of(model, device=name), model, STEP) for name in ("cpu", "xpu", "cuda"))
    assert cpu.device is None and cpu.needed_bytes == cpu.total_bytes == cpu.peak.bytes
    assert xpu.device is None and any("xpu devices" in text for text in xpu.assumptions)
    device = cuda.device
    assert device.allocated == cuda.peak.bytes < device.needed < device.reserved
    assert cuda.needed_bytes == device.needed + device.context + device.nccl < cuda.total_bytes


@pytest.fixture
def prediction():
    model = llama()
    plan = plan_of(model)
    memory = estimate_memory(plan, model, STEP)
    device = replace(memory.device, allocated=10 << 30, needed=11 << 30, reserved=13 << 30)
    return Prediction(
        planned=Planned(plan=plan, model=model, workload=STEP, gpu_memory=80 * 10**9, machine=None),
        memory=replace(memory, device=device),
        communication=tuple(estimate_communication(plan, model, STEP)),
    )


def test_plan_shows_what_the_device_holds(prediction):
    text = plan_text(prediction)
    assert text.startswith("It fits: each rank needs ")
    found = plan_json(prediction, [])["device_memory"]
    assert found["total_bytes"] == found["reserved_bytes"] + found["context_bytes"] + found["nccl_bytes"]
    assert found["needed_bytes"] == prediction.memory.needed_bytes


@pytest.mark.parametrize(
    ("size", "answer", "fits"),
    [("total", "It fits", True), ("needed", "It just fits", True), ("", "It does not", False)],
)
def test_answer_depends_on_total_and_needed_memory(prediction, size, answer, fits):
    memory = {"total": prediction.memory.total_bytes, "needed": prediction.memory.needed_bytes, "": 12 << 30}[size]
    found = replace(prediction, planned=replace(prediction.planned, gpu_memory=memory))
    assert plan_text(found).startswith(answer) and found.fits is fits
    assert ("return cached memory" in plan_text(found).replace("\n", " ")) == (size == "needed")
