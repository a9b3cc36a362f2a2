"""Makes ``scaled_dot_product_attention`` and ``dropout`` on meta tensors run the operators that they run on a device.

On ``meta`` it always runs the formula, which keeps the whole matrix of attention weights. A CPU or GPU runs a kernel
that keeps one number per row, where the kernel supports the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from hf_fsdp_plugin.torch_private.tracing import cpu_attention, efficient_attention, flash_attention

_MAX_FLASH_HEAD_DIM = 256


@contextmanager
def attention_as_on(device_type: str) -> Iterator[None]:
    """Run the operators of attention and dropout of a device type in this context."""
    with _Attention(device_type):
        yield


class _Attention(TorchFunctionMode):
    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
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
) -> torch.Tensor:
    """Run the operator that torch selects.

    Source: ``aten/src/ATen/native/transformers/sdp_utils_cpp.cpp`` and ``cuda/sdp_utils.cpp``.
    """
    options: dict[str, Any] = {"scale": scale}
    same_dim = query.shape[-1] == value.shape[-1]
    if device_type == "cpu":
        has_fixed_mask = attn_mask is None or not attn_mask.requires_grad
        if dropout_p == 0.0 and same_dim and query.dim() == 4 and has_fixed_mask:
            options |= {"attn_mask": attn_mask}
            output: torch.Tensor = cpu_attention(query, key, value, dropout_p, is_causal, **options)[0]
            return output
    elif query.dim() == 4 and query.dtype in (torch.bfloat16, torch.float16) and attn_mask is None and same_dim:
        if query.shape[-1] <= _MAX_FLASH_HEAD_DIM:
            output = flash_attention(query, key, value, dropout_p, is_causal, **options)[0]
            return output
    elif query.dim() == 4 and not enable_gqa:
        mask = attn_mask.expand(*query.shape[:-1], key.shape[-2]) if attn_mask is not None else None
        output = efficient_attention(query, key, value, mask, query.requires_grad, dropout_p, is_causal, **options)[0]
        return output
    # On meta tensors the formula runs anyway, on the CPU's fake ones a kernel of the CPU would.
    with nullcontext() if device_type == "cpu" else sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
