"""Memory of a step under DDP and under ZeRO-1 and -2, with everything that the formulas of ZeRO leave out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from torch import nn

from hf_fsdp_plugin.estimate.memory.device import framework_bytes
from hf_fsdp_plugin.estimate.memory.engine import Engine
from hf_fsdp_plugin.estimate.memory.estimate import estimate_memory, follow_micro_batches
from hf_fsdp_plugin.estimate.memory.ledger import Ledger
from hf_fsdp_plugin.estimate.memory.optimizer import state_bytes, update_bytes
from hf_fsdp_plugin.estimate.memory.run import profile_step
from hf_fsdp_plugin.estimate.memory.shards import Shard, UnitSizes, ignored_bytes, unit_sizes
from hf_fsdp_plugin.estimate.results import MemoryEstimate
from hf_fsdp_plugin.estimate.workload import Workload
from hf_fsdp_plugin.estimate.zero import SHARDED
from hf_fsdp_plugin.plan.model import FsdpPlan, MeshPlan
from hf_fsdp_plugin.plan.resolve import resolve

_ASSUMPTIONS: Final = (
    "Whole parameters are stored in the master dtype, with a copy in the compute dtype from forward to backward.",
    "DDP's buckets hold a second copy of the gradients (gradient_as_bucket_view=False, torch's default).",
    "ZeRO-1 and ZeRO-2 reduce a unit's gradients when its backward ends, and have no buckets besides.",
)


def estimate_scheme(scheme: str, plan: FsdpPlan, model: nn.Module, workload: Workload) -> MemoryEstimate:
    """Return the memory of a rank under ``DDP``, ``ZeRO-1``, ``ZeRO-2`` or ``ZeRO-3`` on all ranks of a plan.

    ZeRO-3 is FSDP's full_shard with the plan's version and settings. Activations are those of the plan's dtypes; DDP
    under autocast keeps some of them in fp32, so its need is a lower bound in mixed precision.

    Args:
        model: on the meta device, not sharded.
    """
    if scheme == "ZeRO-3":
        spec = plan.spec.with_values(
            {"sharding.strategy": "full_shard", "mesh.shard": "auto", "mesh.replicate": "auto"}, {}
        )
        full = resolve(spec, model, world_size=plan.world_size, device_type=plan.device_type)
        return estimate_memory(full, model, workload)
    _, _, shards_state, shards_grads = SHARDED[scheme]
    whole_plan = replace(plan, strategy="no_shard", mesh=MeshPlan(replicate=plan.world_size, shard=1), backend="fsdp2")
    sizes = unit_sizes(whole_plan, model)
    ledger = Ledger()
    ledger.at("start of the step")
    engine = _ReplicaEngine(whole_plan, sizes, ledger, shards_grads=shards_grads)
    ignored = ignored_bytes(plan, model)
    trained = [shard for unit in sizes for shard in unit.shards]
    parts = [_part(shard, plan.world_size) for shard in trained] if shards_state else trained
    ledger.add("params", sum(unit.params for unit in sizes) + ignored["params"])
    ledger.add("optimizer", state_bytes(workload.optimizer, parts))
    ledger.add("other", ignored["buffers"] + framework_bytes(plan.device_type))
    if scheme == "DDP" and plan.world_size > 1:
        ledger.add("gathered", sum(unit.grad_shard for unit in sizes))  # buckets
    begin, host = follow_micro_batches(engine, workload, profile_step(whole_plan, model, workload))
    ledger.at("optimizer step")
    update = update_bytes(workload, plan.device_type, parts)
    ledger.add("other", update)
    ledger.free("other", update)
    return MemoryEstimate(
        method="closed_form",
        peak=ledger.peak(),
        timeline=ledger.moments(begin),
        host_bytes=host,
        assumptions=_ASSUMPTIONS,
    )


def _part(shard: Shard, num_ranks: int) -> Shard:
    """Return the part of a parameter whose optimizer state a rank has."""
    part = -(-shard.numel // num_ranks)
    return replace(shard, shape=(part,), numel=part)


class _ReplicaEngine(Engine):
    """Whole parameters on every rank. Gradients are kept in the master dtype: whole, or this rank's part."""

    def __init__(self, plan: FsdpPlan, sizes: Sequence[UnitSizes], ledger: Ledger, *, shards_grads: bool) -> None:
        super().__init__(plan, sizes, ledger)
        self._num_parts = plan.world_size if shards_grads else 1

    def pre_forward(self, name: str) -> None:
        sizes = self.sizes[name]
        if sizes.compute_shard and name not in self.gathered:  # a copy in the compute dtype
            self.ledger.add("gathered", sizes.gathered)
            self.gathered.add(name)

    def post_forward(self, name: str) -> None:
        """The copies are kept for backward."""

    def end_forward(self) -> None:
        """Nothing is kept until the end of the forward."""

    def pre_backward(self, name: str) -> None:
        self.pre_forward(name)

    def post_backward(self, name: str, grads: int) -> None:
        self.release(name)
        if not grads:
            return
        if name not in self.reduced:
            self.reduced.add(name)
            self.ledger.add("grads", self.sizes[name].grad_shard // self._num_parts)
        self.ledger.free("grads", grads)
