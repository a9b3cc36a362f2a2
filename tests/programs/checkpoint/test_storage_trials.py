"""Uploads that are throttled, refused, lost or killed: a storage contains complete checkpoints only."""

from __future__ import annotations

import pytest

from scripts.bench.measure.storage_faults import KINDS, run_trials


@pytest.mark.timeout(600)
def test_no_trial_leaves_or_loses_a_checkpoint() -> None:
    found = run_trials(range(len(KINDS)))
    assert all(counts["trials"] == 1 and not counts["lost"] + counts["incomplete"] for counts in found.values())
    assert found["none"]["complete"] == 2 and found["lost"]["complete"] + found["lost"]["failed"] == 2
