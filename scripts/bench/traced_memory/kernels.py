"""What kernels of the CPU do that fake tensors do not show: their own memory, and dtypes that they support."""

from __future__ import annotations

import functools
from typing import Any

import torch

from hf_fsdp_plugin.torch_private.functions import GROUPED_MM, tree_leaves

_ALIGNMENT = 16
"""Bytes to which the rows of a grouped matrix product are padded (aten/src/ATen/native/GroupedMMUtils.h)."""
_NOT_PROMOTED = (torch.ops.aten.where, torch.ops.aten.masked_fill, torch.ops.aten.masked_fill_)
"""Elementwise operators whose condition or mask keeps its dtype."""


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator under fake tensors."""
    if func is GROUPED_MM and args[0].dtype != torch.bfloat16:
        return _grouped_mm(*args, **kwargs)
    return func(*args, **kwargs)


def scratch_bytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that a kernel allocates besides its results and frees before it returns.

    Elementwise operators cast operands of another dtype than the common one to temporary tensors, and compute results
    of another dtype in temporary tensors (``compute_types`` in aten/src/ATen/TensorIterator.cpp; on the CPU only).
    FSDP2 copies gradients to the input of a reduce-scatter with ``chunk_cat``, which pads those whose first dimension
    the ranks do not divide (``_pad_chunk`` in aten/src/ATen/native/TensorShape.cpp; on the CPU only), and casts all of
    them first if they have several dtypes (``torch/csrc/distributed/fsdp/ChunkCat.h``; on the CPU only).
    """
    if func.namespace == "fsdp" and func.__name__.startswith("chunk_cat"):
        return _padded_bytes(*args) + _cast_bytes(args[0], kwargs["out"].dtype)
    if torch.Tag.pointwise not in func.tags or func.overloadpacket in _NOT_PROMOTED:
        return 0
    operands = [value for value in args if isinstance(value, torch.Tensor) and value.dim()]
    if len({operand.dtype for operand in operands}) < 2:
        return 0
    common = functools.reduce(torch.promote_types, (operand.dtype for operand in operands))
    cast = [operand for operand in operands if operand.dtype != common]
    if isinstance(result, torch.Tensor) and result.dtype not in (common, torch.bool) and result is not args[0]:
        cast.append(result)
    return sum(tensor.numel() * common.itemsize for tensor in cast)


def _cast_bytes(tensors: list[torch.Tensor], dtype: torch.dtype) -> int:
    if len({tensor.dtype for tensor in tensors}) < 2:
        return 0
    return sum(tensor.numel() * dtype.itemsize for tensor in tensors if tensor.dtype != dtype)


def _padded_bytes(tensors: list[torch.Tensor], dim: int, num_chunks: int) -> int:
    found = 0
    for tensor in tensors:
        size = tensor.size(dim)
        if size % num_chunks:
            found += tensor.nbytes // size * (-(-size // num_chunks) * num_chunks)
    return found


def collective_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that gloo allocates for a collective; 0 for other operators."""
    return _gloo_bytes(func.__name__, args) if func.namespace == "c10d" else 0


def _gloo_bytes(name: str, args: tuple[Any, ...]) -> int:
    """Return the bytes of gloo's buffer: a copy of the larger side (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).

    An all-gather receives into one flat tensor and copies it to the output. A reduce-scatter reduces a copy of its
    input. An all-reduce and a broadcast work in place.
    """
    if name.startswith(("_allgather_base_", "allgather_")):  # FSDP2 and FSDP1
        return sum(tensor.nbytes for tensor in tree_leaves(args[0]))
    return int(args[1].nbytes) if name.startswith("_reduce_scatter_base_") else 0


def _grouped_mm(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """Return the result of ``grouped_mm`` in another dtype than bf16, which only fake tensors refuse."""
    if left.dim() == 2 and right.dim() == 2:
        assert offs is not None
        shape: tuple[int, ...] = (offs.size(0), left.size(0), right.size(1))
    elif left.dim() == 2:
        shape = (left.size(0), right.size(-1))
    else:
        shape = (left.size(1), right.size(1)) if right.dim() == 2 else (*left.shape[:2], right.size(-1))
    per_row = _ALIGNMENT // left.itemsize
    row = -(-shape[-1] // per_row) * per_row
    strides = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return left.new_empty_strided(shape, strides)
