"""The part of tests/unit/integrations/test_planned_adapters.py that starts processes or computes for seconds."""

import pytest

from hf_fsdp_plugin.tools.plan.estimate.memory.peak import estimate_memory
from scripts.bench.traced_memory import trace_memory
from tests.unit.integrations.test_planned_adapters import adapted, estimate


@pytest.mark.parametrize(
    ("version", "quantized", "precision"),
    [
        (1, False, "no"),
        (1, True, "bf16"),
        pytest.param(1, False, "bf16", marks=pytest.mark.slow),
        pytest.param(2, False, "bf16", marks=pytest.mark.slow),
        pytest.param(2, True, "bf16", marks=pytest.mark.slow),
    ],
)
def test_both_predictions_of_adapters_agree(version, quantized, precision):
    # FSDP1 computes gradients of frozen parameters beside trained ones, or casts the inputs of adapters.
    closed, traced = (
        estimate(adapted(quantized=quantized), version, method, mixed_precision=precision, device="cpu").peak.bytes
        for method in (estimate_memory, trace_memory)
    )
    assert abs(closed / traced - 1) < 0.01
