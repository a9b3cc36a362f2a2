"""Which rank updates which matrix, for optimizers that update whole matrices.

A matrix costs as much as its Newton-Schulz iteration. The most expensive ones are assigned first, each to the rank with
the least work so far. Everything is computed from shapes, so that all ranks get the same result without communication.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

ROUND_BYTES: Final = 64 << 20
"""Bytes of matrices, in fp32, that one rank receives in one exchange, unless a single matrix has more."""


def newton_schulz_flops(shape: Sequence[int], steps: int = 5) -> int:
    """Return the FLOPs of the quintic Newton-Schulz iteration for one matrix, or for the matrices of a stack.

    Each step has the products X·Xᵀ, A·A and B·X of ``_zeropower_via_newtonschulz`` (torch/optim/_muon.py).
    """
    small, large = sorted(shape[-2:])
    return prod(shape[:-2]) * steps * 2 * small * small * (2 * large + small)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """The matrices of one parameter: one for two dimensions, as many as the first one has for three.

    Attributes:
        shape: shape of the parameter.
        cost: cost of all matrices, in any unit.
        is_whole_on_holders: whether each rank of the shard group has equally many whole matrices, as with stacked
            experts whose number is divisible by that of the ranks. They are not sent: their holders update them.
    """

    shape: tuple[int, ...]
    cost: float
    is_whole_on_holders: bool = False

    @property
    def num_matrices(self) -> int:
        return prod(self.shape[:-2])


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """The owners of the matrices of one stack.

    Attributes:
        stack: number of the stack.
        owners: the worker of each matrix: ``replica * num_shards + rank in the shard group``.
    """

    stack: int
    owners: tuple[int, ...]


Round = list[Assignment]
"""Stacks whose matrices are sent in one exchange."""


def divide(stacks: Sequence[Stack], num_shards: int, num_replicas: int = 1) -> list[Round]:
    """Assign all matrices to workers, and divide them into rounds of limited size."""
    num_workers = num_shards * num_replicas
    loads, assigned = [0.0] * num_workers, dict[int, Assignment]()
    order = sorted(range(len(stacks)), key=lambda i: -stacks[i].cost / max(1, stacks[i].num_matrices))
    for number in order:
        stack = stacks[number]
        if stack.is_whole_on_holders:
            owners = []
            for index in range(stack.num_matrices):
                holder = index // (stack.num_matrices // num_shards)
                owner = min(range(holder, num_workers, num_shards), key=loads.__getitem__)
                loads[owner] += stack.cost / stack.num_matrices
                owners.append(owner)
            assigned[number] = Assignment(stack=number, owners=tuple(owners))
    queue = [(load, worker) for worker, load in enumerate(loads)]
    heapq.heapify(queue)
    for number in order:
        stack = stacks[number]
        if number not in assigned:
            owners = []
            for _ in range(stack.num_matrices):
                load, worker = queue[0]
                heapq.heapreplace(queue, (load + stack.cost / stack.num_matrices, worker))
                owners.append(worker)
            assigned[number] = Assignment(stack=number, owners=tuple(owners))
    return _rounds([assigned[number] for number in order], stacks, num_workers)


def _rounds(assignments: Sequence[Assignment], stacks: Sequence[Stack], num_workers: int) -> list[Round]:
    """Divide assignments into rounds. Each one has a matrix for every worker, so that none of them is idle in it."""
    rounds: list[Round] = []
    num_matrices = num_bytes = 0
    for assignment in assignments:
        size = prod(stacks[assignment.stack].shape) * 4
        if not rounds or (num_matrices >= num_workers and num_bytes + size > ROUND_BYTES * num_workers):
            rounds.append([])
            num_matrices = num_bytes = 0
        rounds[-1].append(assignment)
        num_matrices += len(assignment.owners)
        num_bytes += size
    return rounds
