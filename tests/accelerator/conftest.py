"""One rank on the simulated accelerator, in which the cases of cases_device.py run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.accelerator.accelerator_build import available
from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def device_rank() -> Iterator[Ranks]:
    if reason := available():
        pytest.skip(f"no simulated accelerator: {reason}")
    rank = Ranks(1, "accelerator")
    yield rank
    rank.stop()
