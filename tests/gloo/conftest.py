"""One to four gloo ranks, shared by all tests of the session; a world starts with the first test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


def _world(size: int) -> Iterator[Ranks]:
    ranks = Ranks(size)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Ranks]:
    yield from _world(1)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    yield from _world(2)


@pytest.fixture(scope="session")
def three_ranks() -> Iterator[Ranks]:
    yield from _world(3)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    yield from _world(4)
