"""Access to operators while they run, and to the identity of storages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry

from hf_fsdp_plugin.contracts import contracts_of, guard, load

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_PREDICTION = "the prediction of memory and time"
CONTRACTS = (
    *contracts_of("torch.utils._python_dispatch", "refused", _PREDICTION, "TorchDispatchMode"),
    *contracts_of("torch:ops.aten", "refused", _PREDICTION, "_grouped_mm.default", "_local_scalar_dense.default",
                  "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
                  "_scaled_dot_product_efficient_attention"),
    *contracts_of("torch:UntypedStorage", "refused", _PREDICTION, "_cdata"),
    *contracts_of("torch._ops:OpOverload", "refused", _PREDICTION, "_schema", "_overloadpacket"),
)  # fmt: skip

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

if not TYPE_CHECKING:
    TorchDispatchMode = load("torch.utils._python_dispatch:TorchDispatchMode", CONTRACTS)
GROUPED_PRODUCT = load("torch:ops.aten._grouped_mm.default", CONTRACTS)
READ_VALUE = load("torch:ops.aten._local_scalar_dense.default", CONTRACTS)
"""The operator of ``Tensor.item()``."""
cpu_attention = load("torch:ops.aten._scaled_dot_product_flash_attention_for_cpu", CONTRACTS)
flash_attention = load("torch:ops.aten._scaled_dot_product_flash_attention", CONTRACTS)
efficient_attention = load("torch:ops.aten._scaled_dot_product_efficient_attention", CONTRACTS)


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
    if count is None and operator_name(func) == "_grouped_mm":  # rows of an operand times both sizes of a group's other
        return 2 * int(args[0].shape[0] * args[0].shape[1] * args[1].shape[-1])
    return int(count(*args, **kwargs, out_val=out)) if count is not None else 0


guard(globals(), CONTRACTS)
