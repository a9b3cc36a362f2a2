"""A calibration of real ranks predicts the time of their steps."""

from __future__ import annotations

import pytest

from tests.gloo.cases_step_time import calibrated_and_measured
from tests.support.matrices import slow
from tests.support.ranks import Ranks


@pytest.mark.cpu_ranks("the simulated device does not show speed")
@pytest.mark.parametrize("version", [slow(1), slow(2)])
def test_calibrated_ranks_predict_their_step_time(two_ranks: Ranks, version: int) -> None:
    (machine, predicted, measured), (other, *_) = two_ranks.run(calibrated_and_measured, version)
    assert machine == other  # all ranks have the same figures
    assert not machine.overlaps
    assert {row.kind for row in machine.collectives} == {"all_gather", "reduce_scatter", "all_reduce"}
    assert all(value > 0 for curve in machine.curves.values() for _, value in curve)
    # "python -m scripts.bench step_time" measures the accuracy; this short calibration runs beside other tests.
    assert 1 / 3 < predicted / measured < 3
