"""Sums and hashes of the bits of tensors, which show whether weights arrived unchanged."""

from __future__ import annotations

from collections.abc import Iterable

import torch

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integer type with the same size."""
_ADDED = 1 << 15
_ADDED_ON_ACCELERATOR = 1 << 24
"""Elements that are added at a time, of which torch makes a copy with 8 bytes each."""


def sum_bits(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the sum of the tensors' elements, read as integers, modulo 2**64; ``None`` if there are none to read.

    The sums of the parts of a tensor add up to the sum of the tensor. The result is on the device of the tensors.
    """
    total = None
    for tensor in tensors:
        tensor = tensor.detach()
        if type(tensor) is not torch.Tensor or tensor.element_size() not in INTEGERS or tensor.is_meta:
            return None
        added = _sum(tensor.contiguous().view(-1).view(INTEGERS[tensor.element_size()]))
        total = added if total is None else total + added.to(total.device)
    return total


def _sum(integers: torch.Tensor) -> torch.Tensor:
    # torch makes a copy of 64-bit integers first. On the CPU a small one stays in the processor's cache, and leaves
    # no hole between the shards in memory. numpy needs none, but FSDP1 cannot resize a storage that numpy has seen.
    size = _ADDED if integers.device.type == "cpu" else _ADDED_ON_ACCELERATOR
    parts = integers.split(size) if integers.numel() else [integers]
    total = parts[0].sum(dtype=torch.int64)
    for part in parts[1:]:
        total += part.sum(dtype=torch.int64)
    return total


def hash_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a hash of a tensor's bits as an int64 scalar on its device; the sum of its bits if that has no kernel."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.element_size() in INTEGERS:  # torch has no kernel for complex numbers, fp8 and unsigned integers
        tensor = tensor.contiguous().view(INTEGERS[tensor.element_size()])
    try:
        return torch.hash_tensor(tensor).view(torch.int64)
    except NotImplementedError:  # torch 2.13 has kernels for CPU and CUDA
        return _sum(tensor.reshape(-1))
