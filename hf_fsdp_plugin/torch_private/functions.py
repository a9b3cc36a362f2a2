"""Functions and classes that torch provides only with private names."""

from __future__ import annotations

import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "ATTENTION_OPS",
    "GROUPED_MM",
    "ActivationWrapper",
    "CheckpointWrapper",
    "IncompatibleKeys",
    "StorageInfo",
    "checkpoint_wrapper",
    "checkpointed_module",
    "compute_local_shape_and_global_offset",
    "default_store",
    "in_backward",
    "scale_tensors",
    "tensor_norms",
    "tree_leaves",
    "tree_map_only",
    "uses_torch_checkpoint",
]

ATTENTION_OPS = (
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
"""The operators that ``scaled_dot_product_attention`` calls."""
GROUPED_MM = torch.ops.aten._grouped_mm.default
"""The operator that ``torch.nn.functional.grouped_mm`` calls."""


def checkpointed_module(wrapper: ActivationWrapper) -> nn.Module:
    """Return the module inside a wrapper of activation checkpointing or offload."""
    return wrapper._checkpoint_wrapped_module


def scale_tensors(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all tensors by ``factor`` in place, in one kernel launch if possible."""
    torch._foreach_mul_(tensors, factor)


def tensor_norms(tensors: list[torch.Tensor], norm_type: float, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the norm of each tensor, computed in ``dtype``, which must not be narrower than that of a tensor."""
    return torch._foreach_norm(tensors, norm_type, dtype=dtype)


def in_backward() -> bool:
    """Return whether autograd is running a backward on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def uses_torch_checkpoint(wrapper: CheckpointWrapper) -> bool:
    """Return whether the wrapper still calls torch's ``checkpoint``."""
    function = getattr(wrapper.checkpoint_fn, "func", None)
    return function is torch.utils.checkpoint.checkpoint and "forward" not in vars(wrapper)


def profiler_is_running() -> bool:
    """Whether this thread has a profiler of torch. A second one takes its events, and crashes when it is exported."""
    return bool(torch.autograd._profiler_enabled())
