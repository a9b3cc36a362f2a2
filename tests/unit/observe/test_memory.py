"""Bytes of storages."""

import pytest
import torch

from hf_fsdp_plugin.observe.memory import storage_bytes


def test_shared_storage_is_counted_once() -> None:
    tensor = torch.ones(8)
    assert storage_bytes([tensor, tensor[:2], torch.ones(2, device="meta")]) == 32
    assert storage_bytes([tensor, torch.ones(1)], excluding=[tensor]) == 4


def test_quantized_state_counts_the_tensors_inside():
    quantized = pytest.importorskip("torchao.optim.subclass_8bit").OptimState8bit.zeros((64, 64), block_size=64)
    codes, scales, table = 64 * 64, 64 * 4, 256 * 4
    assert storage_bytes([quantized]) == codes + scales + table
