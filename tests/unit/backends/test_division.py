"""Matrices are divided over ranks by cost, and equally on every rank."""

from __future__ import annotations

from collections import Counter

import pytest

from hf_fsdp_plugin.backends.optimizers.division import ROUND_BYTES, ExchangeRound, Stack, divide, newton_schulz_flops


def stack(*shape: int, whole: bool = False) -> Stack:
    return Stack(shape=shape, cost=newton_schulz_flops(shape), is_whole_on_holders=whole)


def loads(rounds: list[ExchangeRound], stacks: list[Stack]) -> Counter[int]:
    found: Counter[int] = Counter()
    for number, owners in (assignment for each in rounds for assignment in each):
        for owner in owners:
            found[owner] += round(stacks[number].matrix_cost)
    return found


def test_flops_are_those_of_the_products() -> None:
    gram, square, product = 2 * 4 * 4 * 8, 2 * 4 * 4 * 4, 2 * 4 * 4 * 8
    assert newton_schulz_flops((4, 8)) == newton_schulz_flops((8, 4)) == 5 * (gram + square + product)
    assert newton_schulz_flops((3, 8, 4), steps=1) == 3 * (gram + square + product)


@pytest.mark.parametrize(("num_shards", "num_replicas"), [(1, 1), (3, 1), (4, 2)])
def test_equal_matrices_are_divided_equally(num_shards: int, num_replicas: int) -> None:
    stacks = [stack(64, 64)] * 24
    found = loads(divide(stacks, num_shards, num_replicas), stacks)
    assert set(found.values()) == {24 * stacks[0].cost // (num_shards * num_replicas)}
    assert sorted(found) == list(range(num_shards * num_replicas))


def test_unequal_matrices_are_balanced_by_cost() -> None:
    stacks = [stack(8 * size, 64 + size) for size in range(1, 40)] + [stack(2000, 64)]
    found = loads(divide(stacks, 4), stacks)
    assert max(found.values()) <= 1.05 * sum(found.values()) / 4


def test_whole_experts_stay_on_their_holders() -> None:
    stacks = [stack(8, 16, 32, whole=True), stack(16, 32)]
    assignments = dict(divide(stacks, 2, 2)[0])
    assert [owner % 2 for owner in assignments[0]] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert sorted(Counter(assignments[0]).values()) == [2, 2, 2, 2]


def test_rounds_have_limited_size_and_work_for_all() -> None:
    rows = ROUND_BYTES // 4 // 1024
    stacks = [stack(rows, 1024)] * 8
    assert [len(each) for each in divide(stacks, 2)] == [2, 2, 2, 2]
    assert len(divide([stack(64, 64)] * 8, 2)) == 1
    assert divide([], 2) == []
