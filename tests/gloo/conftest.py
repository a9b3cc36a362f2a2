"""One to four ranks, shared by all tests of the session; a world starts with the first test that asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.accelerator_build import available
from tests.support.ranks import Ranks

_DEVICE = os.environ.get("RANKS_DEVICE", "cpu")
"""``accelerator`` runs the tests on ranks of the simulated accelerator, except those that start other processes."""
_FEW = os.environ.get("RANKS_CASES") == "few"
"""Whether each test runs once for each FSDP version only, beside a run on other ranks that has its other parameters."""


def _ranks(size: int, device: str = _DEVICE) -> Any:
    @pytest.fixture(scope="session")
    def ranks() -> Iterator[Ranks]:
        if device == "accelerator" and (reason := available()):
            pytest.skip(f"no simulated accelerator: {reason}")
        world = Ranks(size, device)
        yield world
        world.stop()

    return ranks


one_rank = _ranks(1)
two_ranks = _ranks(2)
three_ranks = _ranks(3)
four_ranks = _ranks(4)
two_accelerator_ranks = _ranks(2, "accelerator")
four_accelerator_ranks = _ranks(4, "accelerator")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark combinations of parameters as slow whose values all occur in other cases of the same test.

    The quick run has each value of each parameter of a test at least once, the slow run all other combinations.
    """
    cases: dict[object, list[pytest.Function]] = {}
    for item in items:
        if (only := item.get_closest_marker("cpu_ranks")) and _DEVICE == "accelerator":
            item.add_marker(pytest.mark.skip(reason=f"runs on CPU ranks only: {only.args[0]}"))
        is_here = item.path.parent == Path(__file__).parent and isinstance(item, pytest.Function)
        if is_here and hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            cases.setdefault((item.path, item.originalname), []).append(item)
    for same_test in cases.values():
        for case in _redundant(same_test):
            case.add_marker(pytest.mark.slow)


def _redundant(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Return the cases that are left when each value of each parameter is covered, with greedy choices."""
    values = {case.nodeid: {("", ""), *_values(case)} for case in cases}
    missing = set().union(*values.values())
    left = list(cases)
    while missing:
        best = max(left, key=lambda case: len(values[case.nodeid] & missing))
        missing -= values[best.nodeid]
        left.remove(best)
    return left


def _values(case: pytest.Function) -> set[tuple[str, str]]:
    """Return the parameters of a case; if few cases run, its FSDP version only."""
    values = {(name, str(value)) for name, value in case.callspec.params.items()}
    return {(name, value) for name, value in values if not _FEW or name == "version" or value.startswith("fsdp")}
