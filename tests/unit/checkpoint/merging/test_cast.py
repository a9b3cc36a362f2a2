"""Conversions match torch bit for bit, except for NaN payloads."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_fsdp_plugin.checkpoint.merging.copying import convert_dtype
from hf_fsdp_plugin.checkpoint.merging.output import FLOATS

SPECIAL = [0.0, -0.0, 1.0, 65504.0, 65520.0, -1e30, 3.4e38, 3.3961e38, 1e-40, 6e-8, float("inf"), float("-inf")]
PAIRS = [pair for pair in itertools.product(FLOATS, FLOATS) if pair[0] != pair[1]]


def as_bytes(values: torch.Tensor) -> memoryview:
    return memoryview(bytearray(values.view(torch.uint8).numpy().tobytes()))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_conversion_matches_torch(source: str, target: str) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (50_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    # Values half-way between two bfloat16 are rounded to even.
    halfway = ((bits & ~0xFFFF) | 0x8000).view(torch.float32)
    anything = torch.cat([torch.tensor(SPECIAL), bits.view(torch.float32), halfway])
    values = anything.to(getattr(torch, source))
    expected = values.to(getattr(torch, target))
    out = memoryview(bytearray(expected.numel() * expected.element_size()))
    overflowed = convert_dtype(as_bytes(values), source, target, out)
    found = torch.frombuffer(out, dtype=expected.dtype)
    assert torch.equal(found.isnan(), values.isnan())
    kept = ~values.isnan()
    assert torch.equal(found[kept].view(torch.uint8), expected[kept].view(torch.uint8))
    assert overflowed == int((expected.isinf() & values.isfinite()).sum())


def test_nan_stays_nan_in_bfloat16() -> None:
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -0x7FFFFF], dtype=torch.int32)
    out = memoryview(bytearray(2 * len(bits)))
    assert convert_dtype(as_bytes(bits), "float32", "bfloat16", out) == 0
    assert torch.frombuffer(out, dtype=torch.bfloat16).isnan().all()
