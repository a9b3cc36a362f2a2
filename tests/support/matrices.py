"""Parameters and marks of tests: which cases are quick, slow (``-m slow``), or need a release of Transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from itertools import product
from typing import Any

import pytest

from hf_fsdp_plugin.supported import release_of

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


def needs_transformers(release: str) -> pytest.MarkDecorator:
    """Skip a test of what Transformers has since a release: 5.19 for a tensor axis, 5.20 for an expert axis."""
    is_older = release_of(version("transformers")) < release_of(release)
    return pytest.mark.skipif(is_older, reason=f"needs transformers>={release}")
