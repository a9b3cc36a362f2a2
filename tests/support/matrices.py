"""Parameters of tests: which cases are quick, and which run only with ``-m slow``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest

FSDP1_RACE = pytest.mark.cpu_ranks(
    "in fp32, FSDP1 sets missing gradients to zero on its stream for casts, for which no other stream waits"
)


def alternating(rows: Iterable[Any], columns: Sequence[Any] = (1, 2)) -> list[Any]:
    """Every pair of a row and a column (default: the FSDP versions). One column of each row is quick, in turn."""
    return [
        pytest.param(row, column, marks=() if index % len(columns) == position else pytest.mark.slow)
        for (index, row), (position, column) in product(enumerate(rows), enumerate(columns))
    ]


def slow(*values: Any) -> Any:
    """The values of one case that is marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)
