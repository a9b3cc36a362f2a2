"""Access to operators while they run, and to the identity of storages."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = [
    "GROUPED_PRODUCT",
    "READ_VALUE",
    "TorchDispatchMode",
    "cpu_attention",
    "efficient_attention",
    "flash_attention",
    "flops_of",
    "is_view",
    "operator_name",
    "storage_key",
]

GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
READ_VALUE = torch.ops.aten._local_scalar_dense.default
"""The operator of ``Tensor.item()``."""
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention


def storage_key(of: torch.Tensor | torch.UntypedStorage) -> int:
    """Return a number that identifies a storage, or a tensor's, while it exists. Views have the key of their base."""
    storage = of.untyped_storage() if isinstance(of, torch.Tensor) else of
    return int(storage._cdata)


def operator_name(func: Any) -> str:
    """Return the name of a dispatched operator without namespace: ``mm``."""
    return str(func._schema.name).partition("::")[2]


def is_view(func: Any) -> bool:
    """Whether a dispatched operator returns a view of an argument."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of a dispatched operator; 0 if torch does not count it."""
    count = flop_registry.get(func._overloadpacket)
    return int(count(*args, **kwargs, out_val=out)) if count is not None else 0
