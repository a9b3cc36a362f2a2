"""Uploads that are throttled, refused, lost or killed: a storage contains complete checkpoints only."""

from __future__ import annotations

import pytest

from scripts.bench.measure.storage_faults import KINDS, run_trials


@pytest.mark.timeout(600)
def test_no_trial_leaves_or_loses_a_checkpoint() -> None:
    found = run_trials(range(len(KINDS)))
    assert all(counts["trials"] == 1 and not counts["lost"] + counts["incomplete"] for counts in found.values())
    assert sum(counts["complete"] for counts in found.values()) > 0
    assert all(counts["faults"] > 0 for kind, counts in found.items() if kind not in ("none", "refused"))
