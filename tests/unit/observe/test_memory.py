"""Bytes of storages."""

import torch

from hf_fsdp_plugin.observe.memory import storage_bytes


def test_shared_storage_is_counted_once() -> None:
    tensor = torch.ones(8)
    assert storage_bytes([tensor, tensor[:2], torch.ones(2, device="meta")]) == 32
    assert storage_bytes([tensor, torch.ones(1)], excluding=[tensor]) == 4
