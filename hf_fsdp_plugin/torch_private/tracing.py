"""Access to operators while they run, and to the identity of storages."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "GROUPED_PRODUCT",
    "READ_VALUE",
    "TorchDispatchMode",
    "cpu_attention",
    "efficient_attention",
    "flash_attention",
    "storage_key",
]

GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
READ_VALUE = torch.ops.aten._local_scalar_dense.default
"""The operator of ``Tensor.item()``."""
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies the tensor's storage while it exists. Views have the key of their base."""
    return int(tensor.untyped_storage()._cdata)
