"""The part of tests/unit/estimate/test_memory.py that starts processes or computes for seconds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.estimate.test_memory import QUICK, estimate


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("version", [1, 2])
def test_skipped_layers_are_counted_as_if_they_had_run(version, checkpointing, monkeypatch):
    options = {"version": version, "activation_checkpointing": checkpointing, "mixed_precision": "bf16", "ranks": 4}
    skipped = estimate(**options)
    monkeypatch.setattr("hf_fsdp_plugin.estimate.memory.meta_pass._MIN_LAYERS", 100)
    assert estimate(**options).peak == skipped.peak


@QUICK
@given(
    micro_batch=st.integers(1, 4),
    seq_len=st.integers(8, 64),
    more=st.tuples(st.integers(0, 3), st.integers(0, 64)),
    checkpointing=st.sampled_from(["none", "full"]),
)
def test_peak_grows_with_batch_and_length(micro_batch, seq_len, more, checkpointing):
    small = estimate(2, micro_batch, seq_len, activation_checkpointing=checkpointing)
    large = estimate(2, micro_batch + more[0], seq_len + more[1], activation_checkpointing=checkpointing)
    assert large.peak.bytes >= small.peak.bytes
