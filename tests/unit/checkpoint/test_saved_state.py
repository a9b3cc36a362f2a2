"""Which rank writes a shard that several ranks have."""

from __future__ import annotations

import pytest

from hf_fsdp_plugin.checkpoint.saved_state import replica_of_ranks


@pytest.mark.parametrize(
    ("groups", "world_size"),
    [
        ([(0, 2), (1, 3)], 4),  # a parameter that two tensor-parallel ranks have whole
        ([(0, 1), (2, 3)], 4),
        ([tuple(range(first, 1024, 8)) for first in range(8)], 1024),
        ([tuple(range(first, first + 256)) for first in range(0, 1024, 256)], 1024),
    ],
    ids=["strided", "consecutive", "strided, 1024", "consecutive, 1024"],
)
def test_each_group_with_a_copy_has_its_number(groups: list[tuple[int, ...]], world_size: int) -> None:
    found = [replica_of_ranks(ranks, world_size) for ranks in groups]
    assert found == [(number, len(groups)) for number in range(len(groups))]
