"""``estimate_memory``: follows one step of a rank, and returns its memory by kind at every moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from hf_fsdp_plugin.estimate.memory.assumptions import assumptions
from hf_fsdp_plugin.estimate.memory.device import UNKNOWN, Gpu, device_memory, framework_bytes
from hf_fsdp_plugin.estimate.memory.engine import Engine
from hf_fsdp_plugin.estimate.memory.fsdp1 import Fsdp1Engine
from hf_fsdp_plugin.estimate.memory.fsdp2 import Fsdp2Engine
from hf_fsdp_plugin.estimate.memory.ledger import Ledger
from hf_fsdp_plugin.estimate.memory.optimizer import state_bytes, update_bytes
from hf_fsdp_plugin.estimate.memory.profile import Stage, StepProfile
from hf_fsdp_plugin.estimate.memory.run import profile_step
from hf_fsdp_plugin.estimate.memory.shards import UnitSizes, ignored_bytes, unit_sizes
from hf_fsdp_plugin.estimate.results import MemoryEstimate
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.plan.model import FsdpPlan


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
        SpecError: the model has other inputs than a batch of text or images (FSDP-E811).
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
    shards = [shard for unit in sizes for shard in unit.shards]
    ledger = Ledger()
    ledger.at("start of the step")
    engine: Engine = (Fsdp1Engine if plan.backend == "fsdp1" else Fsdp2Engine)(plan, sizes, ledger)
    params, state = sum(unit.params for unit in sizes), state_bytes(workload.optimizer, shards)
    host = params + state + sum(unit.grad_shard for unit in sizes) if engine.offloads else 0
    ledger.add("params", ignored["params"] + (0 if engine.offloads else params))
    ledger.add("optimizer", 0 if engine.offloads else state)
    ledger.add("other", ignored["buffers"] + framework_bytes(plan.device_type, gpu))
    batches, offloaded = follow_micro_batches(engine, workload, profile)
    if workload.clip_norm:
        ledger.at("clipping")
    ledger.at("optimizer step")
    update = 0 if engine.offloads else update_bytes(workload, plan.device_type, shards)
    ledger.add("other", update)
    ledger.free("other", update)
    peak = ledger.peak()
    return MemoryEstimate(
        method="closed_form",
        peak=peak,
        timeline=ledger.moments(batches),
        host_bytes=host + offloaded,
        assumptions=assumptions(plan, workload, gpu),
        device=device_memory(plan, gpu, peak.bytes),
    )


def follow_micro_batches(engine: Engine, workload: Workload, profile: StepProfile) -> tuple[int, int]:
    """Follow all different micro-batches of a step. Return where the last one's moments begin, and host bytes."""
    ledger = engine.ledger
    ledger.add("activations", profile.input_bytes)
    num = min(workload.accumulation, 3)  # the first, one in the middle, and the last
    begin = host = 0
    for number in range(num):
        engine.syncs = workload.sync_each_batch or number == num - 1
        begin = ledger.num_places
        host = max(host, _follow(engine, profile))
    ledger.free("activations", profile.input_bytes)
    return begin, host


def _follow(engine: Engine, profile: StepProfile) -> int:
    """Follow a forward and backward pass. Return the largest number of bytes that activation offload moves."""
    places = _Places(engine.plan.model_class)
    host = most = 0
    for stage in profile.stages:
        engine.ledger.at(places.at(stage))
        _act(engine, stage)
        engine.run(stage)
        host += stage.host_bytes
        most = max(most, host)
    engine.end_backward()
    return most


def _act(engine: Engine, stage: Stage) -> None:
    if stage.kind == "pre_forward":
        engine.pre_forward(stage.name)
    elif stage.kind == "post_forward":
        engine.post_forward(stage.name)
    elif stage.kind == "loss":
        engine.end_forward()
    elif stage.kind == "pre_backward":
        engine.pre_backward(stage.name)
    elif stage.kind == "post_backward":
        engine.post_backward(stage.name, stage.freed_grads)


class _Places:
    """The names of the places of a step."""

    def __init__(self, model_class: str) -> None:
        self._model_class = model_class
        self._pass = "forward"
        self._inside: list[str] = []

    def at(self, stage: Stage) -> str:
        if stage.kind in ("pre_forward", "enter", "pre_backward", "enter_backward"):
            self._inside.append(stage.name)
        elif stage.kind == "loss":
            self._pass, self._inside = "backward", []
        elif stage.kind == "post_backward":
            place = self._place(stage.name)
            self._leave(stage.name)
            return place
        elif stage.kind != "start":
            self._leave(stage.name)
        return self._place(self._inside[-1] if self._inside else "")

    def _leave(self, name: str) -> None:
        self._inside = [other for other in self._inside if other != name]

    def _place(self, name: str) -> str:
        return f"{self._pass} of {name or self._model_class}"
