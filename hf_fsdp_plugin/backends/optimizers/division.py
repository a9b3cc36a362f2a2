"""Which rank updates which matrix, for optimizers that update whole matrices.

A matrix costs as much as its Newton-Schulz iteration. The most expensive ones are assigned first, each to the rank with
the least work so far. Everything is computed from shapes, so that all ranks get the same result without communication.
"""

from __future__ import annotations

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

    @property
    def matrix_cost(self) -> float:
        return self.cost / max(1, self.num_matrices)


ExchangeRound = list[tuple[int, list[int]]]
"""The stacks whose matrices are sent in one exchange: the number of each, and the workers that own its matrices.

The number of a worker is ``replica * num_shards + rank in the shard group``.
"""


def divide(stacks: Sequence[Stack], num_shards: int, num_replicas: int = 1) -> list[ExchangeRound]:
    """Assign all matrices to workers, and divide them into rounds of limited size.

    Each round has a matrix for every worker, so that none of them is idle in it.
    """
    num_workers = num_shards * num_replicas
    loads, owners = [0.0] * num_workers, dict[int, list[int]]()
    order = sorted(range(len(stacks)), key=lambda number: -stacks[number].matrix_cost)
    for number in sorted(order, key=lambda number: not stacks[number].is_whole_on_holders):
        stack, owners[number] = stacks[number], []
        for index in range(stack.num_matrices):
            holder = index * num_shards // stack.num_matrices
            held = range(holder, num_workers, num_shards)
            owner = min(held if stack.is_whole_on_holders else range(num_workers), key=loads.__getitem__)
            loads[owner] += stack.matrix_cost
            owners[number].append(owner)
    rounds: list[ExchangeRound] = []
    num_matrices = num_bytes = 0
    for number in order:
        size = prod(stacks[number].shape) * 4
        if not rounds or (num_matrices >= num_workers and num_bytes + size > ROUND_BYTES * num_workers):
            rounds.append([])
            num_matrices = num_bytes = 0
        rounds[-1].append((number, owners[number]))
        num_matrices += stacks[number].num_matrices
        num_bytes += size
    return rounds
