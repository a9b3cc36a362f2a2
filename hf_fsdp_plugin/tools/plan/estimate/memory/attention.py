"""Attention and dropout of a model on the meta device: the operators that they run on a device.

On ``meta`` they would run formulas, and the formula of attention keeps the whole matrix of weights, while a CPU or GPU
runs a kernel that keeps one number per row. What the kernels keep is counted in ``allocations``.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from hf_fsdp_plugin.torch_private import functions

_ATTENTION: Final = F.scaled_dot_product_attention
"""The function itself. Context parallelism replaces the attribute, and calls it for divided tensors."""
_MAX_FLASH_HEAD_DIM: Final = 256


class DeviceAttention(TorchFunctionMode):
    """Runs the operators of attention and dropout of a device type."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATTENTION:
            return run_attention(self._device_type, *args, **kwargs)
        if func is F.dropout and self._device_type != "cpu":
            return dropout_with_byte_mask(*args, **kwargs)
        return func(*args, **kwargs)


def dropout_with_byte_mask(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Keep a mask of one byte per element, as GPUs do. The CPU keeps one in the dtype of the input."""
    return torch.native_dropout(input, p, training)[0] if training and p else input


def run_attention(
    device_type: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Run the operator that torch selects, and return its output.

    Source: ``aten/src/ATen/native/transformers/sdp_utils_cpp.cpp`` and ``cuda/sdp_utils.cpp``.
    """
    arguments = query, key, value
    is_4d, same_dim = query.dim() == 4, query.shape[-1] == value.shape[-1]
    if device_type == "cpu":
        has_fixed_mask = attn_mask is None or not attn_mask.requires_grad
        if dropout_p == 0.0 and same_dim and is_4d and has_fixed_mask:
            return functions.cpu_attention(*arguments, dropout_p, is_causal, scale=scale, attn_mask=attn_mask)[0]
    elif is_4d and query.dtype in (torch.bfloat16, torch.float16) and attn_mask is None and same_dim:
        if query.shape[-1] <= _MAX_FLASH_HEAD_DIM:
            return functions.flash_attention(*arguments, dropout_p, is_causal, scale=scale)[0]
    elif is_4d and not enable_gqa:
        mask = attn_mask.expand(*query.shape[:-1], key.shape[-2]) if attn_mask is not None else None
        needs_gradient = query.requires_grad
        return functions.efficient_attention(*arguments, mask, needs_gradient, dropout_p, is_causal, scale=scale)[0]
    # On meta tensors the formula runs anyway, on the CPU's fake ones a kernel of the CPU would.
    with nullcontext() if device_type == "cpu" else sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            *arguments, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
