"""What the divided steps of Muon need: the matrices of each rank, memory, collectives, arithmetic.

The matrices are divided by the function that the steps themselves use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, prod
from typing import Final

from hf_fsdp_plugin.backends.optimizers.division import Stack, divide, newton_schulz_flops
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.tools.plan.estimate.unit_bytes import ParameterShard

_SENT: Final = 2
"""Bytes of an element of a matrix: momenta and updates are sent in bf16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonStep:
    """One step of the rank that has most to do.

    Attributes:
        num_matrices: all matrices; ``most_matrices``: those of one rank.
        flops: of the rank's iterations; ``share``: their part of the FLOPs of all matrices.
        memory: bytes of temporary tensors.
        exchanges: bytes of one side of an all-to-all of the shard group -> number of calls.
        results: bytes of the output of an all-gather between replicas -> number of calls.
    """

    num_matrices: int
    most_matrices: int
    flops: int
    share: float
    memory: int
    exchanges: Counter[int]
    results: Counter[int]


def muon_step(plan: FsdpPlan, shards: Iterable[ParameterShard]) -> MuonStep:
    """Return the step of a plan. Matrices that a tensor or expert axis divides are not divided further."""
    matrices = [shard for shard in shards if shard.trainable and len(shard.whole) == 2 and shard.axis is None]
    num_shards, replicas = (plan.mesh.num_shards, plan.mesh.replicate) if plan.backend == "fsdp2" else (1, 1)
    costs = [newton_schulz_flops(shard.whole) for shard in matrices]
    rounds = divide(
        [Stack(shape=s.whole, cost=cost) for s, cost in zip(matrices, costs, strict=True)], num_shards, replicas
    )
    memory, flops, numbers = 0, Counter[int](), Counter[int]()
    exchanges, results = Counter[int](), Counter[int]()
    for each in rounds:
        sizes, products = Counter[int](), Counter[int]()
        of_replica, of_shards = Counter[int](), 0
        for number, (owner,) in each:
            shape, shard = matrices[number].whole, prod(matrices[number].shape) * _SENT
            small = min(shape)
            flops[owner] += costs[number]
            numbers[owner] += 1
            sizes[owner] += prod(shape) * _SENT
            # the iterates before and after a step, and its two products of rows
            products[owner] = max(products[owner], 2 * (prod(shape) + small * small) * _SENT)
            of_replica[owner // num_shards] += shard
            of_shards += shard
        most, exchanged = max(sizes.values()), max(*sizes.values(), *of_replica.values())
        # Inputs and outputs are shards. Beside them are the received parts or the products, or what is sent back.
        largest = max(products.values())
        memory = max(memory, 2 * of_shards + most + max(most, of_shards + most, 2 * of_shards, largest))
        if num_shards > 1:
            exchanges[exchanged] += 2
        if replicas > 1:
            results[replicas * max(of_replica.values())] += 1
    return MuonStep(
        num_matrices=len(matrices), most_matrices=max(numbers.values(), default=0),
        flops=max(flops.values(), default=0), share=max(flops.values(), default=0) / max(1, sum(costs)),
        memory=memory, exchanges=exchanges, results=results,
    )  # fmt: skip


def describe(plan: FsdpPlan, step: MuonStep) -> str:
    """Return one sentence about who orthogonalizes which matrices."""
    workers = plan.mesh.num_shards * plan.mesh.replicate
    if workers == 1:
        return f"Muon orthogonalizes all {step.num_matrices} matrices on one rank."
    if plan.backend == "fsdp1":
        return "Muon is refused on flat shards of FSDP1 (FSDP-E320): set fsdp_version: 2."
    sent = sum(size * calls for size, calls in (*step.exchanges.items(), *step.results.items()))
    replicas = ", with the results that replicas exchange" if plan.mesh.replicate > 1 else ""
    return (
        f"Muon divides {step.num_matrices} matrices over {workers} ranks: at most {step.most_matrices} each, "
        f"{step.share:.1%} of the work (equal parts: {1 / workers:.1%}). Momenta are sent to their owners and updates "
        f"back in bf16, at most {ceil(sent / 1e6)} MB per rank and step{replicas}."
    )
