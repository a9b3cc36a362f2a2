"""Checksums of weights need a small and constant amount of memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_fsdp_plugin.observe import weight_statistics, weights


class LargestResult(TorchDispatchMode):
    """Records the number of bytes of the largest tensor that an operation returns in memory of its own."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and func.namespace == "aten" and not func.is_view:
            self.nbytes = max(self.nbytes, result.numel() * result.element_size())
        return result


def test_checksum_copies_only_a_part_of_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_statistics, "_PART", 1000)
    tensors = [torch.linspace(-1, 2, 12_345).to(torch.bfloat16), torch.ones(3, 7), torch.zeros(0)]
    with LargestResult() as largest:
        found = weights._checksum(tensors)
    doubles = [tensor.double() for tensor in tensors]
    expected = sum(t.sum().item() for t in doubles), sum(t.abs().sum().item() for t in doubles)
    assert found is not None and tuple(found.tolist()) == pytest.approx(expected)
    assert 0 < largest.nbytes <= 1000 * 8


def test_tensors_on_meta_have_no_checksum() -> None:
    assert weights._checksum([torch.ones(2), torch.ones(2, device="meta")]) is None
    empty = weights._checksum([])
    assert empty is not None and empty.tolist() == [0.0, 0.0]
