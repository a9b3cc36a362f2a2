"""One to four gloo ranks, shared by all tests of the session; a world starts with the first test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ranks import Ranks


def _ranks(size: int) -> Any:
    @pytest.fixture(scope="session")
    def ranks() -> Iterator[Ranks]:
        world = Ranks(size)
        yield world
        world.stop()

    return ranks


one_rank = _ranks(1)
two_ranks = _ranks(2)
three_ranks = _ranks(3)
four_ranks = _ranks(4)
