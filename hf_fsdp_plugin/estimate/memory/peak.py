"""Memory of a step in closed form: shards and buffers from the plan, and activations counted on meta tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from hf_fsdp_plugin.estimate.memory.device import UNKNOWN, Gpu, assumptions, device_memory, framework_bytes
from hf_fsdp_plugin.estimate.memory.fsdp1 import Fsdp1Engine
from hf_fsdp_plugin.estimate.memory.fsdp2 import Fsdp2Engine
from hf_fsdp_plugin.estimate.memory.meta_pass import profile_step
from hf_fsdp_plugin.estimate.memory.step import Engine, Ledger, StepProfile, stage_positions
from hf_fsdp_plugin.estimate.results import MemoryEstimate
from hf_fsdp_plugin.estimate.unit_sizes import UnitSizes, ignored_bytes, unit_sizes
from hf_fsdp_plugin.estimate.workload import Workload, state_bytes, update_bytes
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan

__all__ = ["estimate_memory", "follow_step", "profile_step"]


def estimate_memory(
    plan: FsdpPlan, model: nn.Module, workload: Workload, *, profile: StepProfile | None = None, gpu: Gpu = UNKNOWN
) -> MemoryEstimate:
    """Return the memory of the rank that needs most, in the steady state, with every moment of a step.

    Shards, buffers and optimizer state are computed from the plan, as torch's FSDP allocates them. Activations are
    counted by running the model on the meta device; equal layers run once. Takes well under a second for a 70 B model.

    Args:
        model: on the meta device, not sharded. It is unchanged afterwards.
        profile: what :func:`profile_step` has returned for the same model, units, dtypes, checkpointing and sizes.
        gpu: what is known of the GPU of a plan for CUDA.

    Raises:
        SpecError: the model has other inputs than a batch of text or images (FSDP-E811), or cannot run on the meta
            device (FSDP-E810).
    """
    profile = profile or profile_step(plan, model, workload)
    return follow_step(plan, unit_sizes(plan, model), ignored_bytes(plan, model), workload, profile, gpu)


def follow_step(
    plan: FsdpPlan,
    sizes: Sequence[UnitSizes],
    ignored: Mapping[str, int],
    workload: Workload,
    profile: StepProfile,
    gpu: Gpu = UNKNOWN,
) -> MemoryEstimate:
    """Return the estimate from a profile and sizes that are computed already, as the planner does."""
    ledger = Ledger()
    engine = (Fsdp1Engine if plan.backend == "fsdp1" else Fsdp2Engine)(plan, sizes, ledger)
    shards = [shard for unit in sizes for shard in unit.shards]
    params, state = sum(unit.params for unit in sizes), state_bytes(workload.optimizer, shards)
    host = params + state + sum(unit.grad_shard for unit in sizes) if engine.offloads else 0
    ledger.at("start of the step")
    ledger.add("params", ignored["params"] + (0 if engine.offloads else params))
    ledger.add("optimizer", 0 if engine.offloads else state)
    ledger.add("other", ignored["buffers"] + framework_bytes(plan.device_type, gpu))
    last_batch, offloaded = _follow_micro_batches(engine, workload, profile)
    if workload.clip_norm:
        ledger.at("clipping")
    ledger.at("optimizer step")
    ledger.use("other", 0 if engine.offloads else update_bytes(workload, plan.device_type, shards))
    peak = ledger.peak()
    return MemoryEstimate(
        peak=peak,
        timeline=ledger.moments(last_batch),
        host_bytes=host + offloaded,
        assumptions=tuple(assumptions(plan, workload, gpu)),
        device=device_memory(plan, gpu, peak.bytes),
    )


def _follow_micro_batches(engine: Engine, workload: Workload, profile: StepProfile) -> tuple[int, int]:
    """Follow all different micro-batches of a step. Return the index of the last one's first moment, and host bytes.

    The host bytes are the most that activation offload moves at a time.
    """
    ledger, root = engine.ledger, engine.plan.model_class
    ledger.add("activations", profile.input_bytes)
    num = min(workload.accumulation, 3)  # the first, one in the middle, and the last
    begin = most = 0
    for number in range(num):
        engine.syncs = workload.sync_each_batch or number == num - 1
        begin, host = len(ledger.places), 0
        for stage, (phase, inside) in zip(profile.stages, stage_positions(profile.stages), strict=True):
            name = stage.name if stage.kind == "post_backward" else inside[-1]
            ledger.at(f"{phase} of {name or root}")
            engine.act(stage)
            engine.run(stage)
            host += stage.host_bytes
            most = max(most, host)
        engine.end_backward()
    ledger.free("activations", profile.input_bytes)
    return begin, most
