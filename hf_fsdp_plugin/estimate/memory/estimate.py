"""Follows one step of a rank, and returns its memory by kind at every moment: of FSDP, and of DDP and ZeRO's stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from torch import nn

from hf_fsdp_plugin.estimate.memory.device import UNKNOWN, Gpu, assumptions, device_memory, framework_bytes
from hf_fsdp_plugin.estimate.memory.fsdp1 import Fsdp1Engine
from hf_fsdp_plugin.estimate.memory.fsdp2 import Fsdp2Engine
from hf_fsdp_plugin.estimate.memory.run import profile_step
from hf_fsdp_plugin.estimate.memory.step import Engine, Ledger, Stage, StepProfile
from hf_fsdp_plugin.estimate.results import MemoryEstimate
from hf_fsdp_plugin.estimate.unit_sizes import Shard, UnitSizes, ignored_bytes, unit_sizes
from hf_fsdp_plugin.estimate.workload import Workload, state_bytes, update_bytes
from hf_fsdp_plugin.estimate.zero import SHARDED
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan, MeshPlan
from hf_fsdp_plugin.plan.resolve import resolve

_REPLICAS: Final = (
    "Whole parameters are stored in the master dtype, with a copy in the compute dtype from forward to backward.",
    "DDP's buckets hold a second copy of the gradients (gradient_as_bucket_view=False, torch's default).",
    "ZeRO-1 and ZeRO-2 reduce a unit's gradients when its backward ends, and have no buckets besides.",
)


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
    engine = (Fsdp1Engine if plan.backend == "fsdp1" else Fsdp2Engine)(plan, sizes, Ledger())
    return _follow(engine, [shard for unit in sizes for shard in unit.shards], ignored, workload, profile, gpu)


def estimate_scheme(scheme: str, plan: FsdpPlan, model: nn.Module, workload: Workload) -> MemoryEstimate:
    """Return the memory of a rank under ``DDP``, ``ZeRO-1``, ``ZeRO-2`` or ``ZeRO-3`` on all ranks of a plan.

    ZeRO-3 is FSDP's full_shard with the plan's version and settings. Activations are those of the plan's dtypes; DDP
    under autocast keeps some of them in fp32, so its need is a lower bound in mixed precision.

    Args:
        model: on the meta device, not sharded.

    Raises:
        SpecError: as :func:`estimate_memory`, or ZeRO-3 does not fit the plan's settings.
    """
    if scheme == "ZeRO-3":
        settings = {"sharding.strategy": "full_shard", "mesh.shard": "auto", "mesh.replicate": "auto"}
        spec = plan.spec.with_values(settings, {})
        full = resolve(spec, model, world_size=plan.world_size, device_type=plan.device_type)
        return estimate_memory(full, model, workload)
    _, _, shards_state, shards_grads = SHARDED[scheme]
    mesh = MeshPlan(replicate=plan.world_size, shard=1)
    whole = replace(plan, strategy="no_shard", mesh=mesh, backend="fsdp2", offload_params=False)
    sizes = unit_sizes(whole, model)
    engine = _ReplicaEngine(whole, sizes, Ledger())
    engine.num_parts = plan.world_size if shards_grads else 1
    engine.has_buckets = scheme == "DDP" and plan.world_size > 1
    shards = [shard for unit in sizes for shard in unit.shards]
    if shards_state:
        shards = [_part(shard, plan.world_size) for shard in shards]
    profile = profile_step(whole, model, workload)
    found = _follow(engine, shards, ignored_bytes(plan, model), workload, profile, UNKNOWN)
    return replace(found, assumptions=_REPLICAS)


def _part(shard: Shard, num_ranks: int) -> Shard:
    """Return the part of a parameter whose optimizer state a rank has."""
    part = -(-shard.numel // num_ranks)
    return replace(shard, shape=(part,), numel=part)


class _ReplicaEngine(Engine):
    """Whole parameters on every rank. Gradients are kept in the master dtype: whole, or this rank's part.

    Attributes:
        num_parts: number of ranks that share the gradients.
        has_buckets: whether the gradients have a second copy, as under DDP.
    """

    num_parts = 1
    has_buckets = False

    def begin(self) -> None:
        if self.has_buckets:
            self.ledger.add("gathered", sum(unit.grad_shard for unit in self.sizes.values()))

    def pre_forward(self, name: str) -> None:
        sizes = self.sizes[name]
        if sizes.compute_shard and name not in self.gathered:  # a copy in the compute dtype
            self.ledger.add("gathered", sizes.gathered)
            self.gathered.add(name)

    def post_forward(self, name: str) -> None:
        """The copies are kept for backward."""

    def pre_backward(self, name: str) -> None:
        self.pre_forward(name)

    def post_backward(self, name: str, grads: int) -> None:
        self.release(name)
        if not grads:
            return
        if name not in self.reduced:
            self.reduced.add(name)
            self.ledger.add("grads", self.sizes[name].grad_shard // self.num_parts)
        self.ledger.free("grads", grads)


def _follow(
    engine: Engine,
    shards: Sequence[Shard],
    ignored: Mapping[str, int],
    workload: Workload,
    profile: StepProfile,
    gpu: Gpu,
) -> MemoryEstimate:
    """Return the memory of a step.

    Args:
        shards: what the optimizer updates on this rank.
    """
    plan, ledger, sizes = engine.plan, engine.ledger, engine.sizes.values()
    ledger.at("start of the step")
    engine.begin()
    params, state = sum(unit.params for unit in sizes), state_bytes(workload.optimizer, shards)
    host = params + state + sum(unit.grad_shard for unit in sizes) if engine.offloads else 0
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
        assumptions=assumptions(plan, workload, gpu),
        device=device_memory(plan, gpu, peak.bytes),
    )


def _follow_micro_batches(engine: Engine, workload: Workload, profile: StepProfile) -> tuple[int, int]:
    """Follow all different micro-batches of a step. Return where the last one's moments begin, and host bytes.

    The host bytes are the most that activation offload moves at a time.
    """
    ledger = engine.ledger
    ledger.add("activations", profile.input_bytes)
    num = min(workload.accumulation, 3)  # the first, one in the middle, and the last
    begin = most = 0
    for number in range(num):
        engine.syncs = workload.sync_each_batch or number == num - 1
        begin, host = ledger.num_places, 0
        for stage, place in zip(profile.stages, _places(profile.stages, engine.plan.model_class), strict=True):
            ledger.at(place)
            engine.act(stage)
            engine.run(stage)
            host += stage.host_bytes
            most = max(most, host)
        engine.end_backward()
    ledger.free("activations", profile.input_bytes)
    return begin, most


def _places(stages: Iterable[Stage], root: str) -> Iterator[str]:
    """Yield the place of each stage: the unit or layer that runs, in forward or backward."""
    phase, inside = "forward", [root]
    for stage in stages:
        name = stage.name or root
        if stage.kind == "loss":
            phase, inside = "backward", [root]
        elif stage.kind in ("pre_forward", "enter", "pre_backward", "enter_backward"):
            inside.append(name)
        elif stage.kind != "start":
            inside = [root, *(other for other in inside[1:] if other != name)]
        yield f"{phase} of {name if stage.kind == 'post_backward' else inside[-1]}"
