"""Sums and hashes of the bits of tensors, and the check that the ranks prepare models with the same weights.

The sums show whether weights arrived unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.loading.mapped_files import find_mapped_parameters
from hf_fsdp_plugin.backends.ranks.agreement import gather_objects
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names, plural

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


def check_same_weights(plan: FsdpPlan, model: nn.Module, device: torch.device) -> Problem | None:
    """Return a warning if the parameters of the model that is to be sharded differ between ranks. Collective.

    Every parameter is read once, except those that all ranks have mapped from equal files. Two numbers are reduced over
    all ranks; names are exchanged only if these differ.
    """
    if plan.pre_sharded or plan.ram_efficient or plan.sync_module_states or plan.world_size == 1:
        return None
    hashes = dict(_hashes(model, find_mapped_parameters(model, device)))
    total = 0
    for bits in hashes.values():
        # Rotate before each XOR: otherwise two equal tensors would leave the checksum unchanged.
        total = (total << 1 ^ total >> 62 ^ bits) & (1 << 63) - 1
    extremes = torch.tensor([total, -total], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    largest, negated = extremes.tolist()
    if largest == -negated:
        return None
    of_ranks = gather_objects(hashes)
    differing = [name for name, bits in of_ranks[0].items() if any(other.get(name) != bits for other in of_ranks)]
    replicas = " The replicas will stay different." if plan.mesh.replicate > 1 else ""
    return Problem(
        code="FSDP-W325",
        setting="loading.sync_module_states",
        message=f"the ranks have different weights in {plural(len(differing), 'parameter')} of {plan.model_class}: "
        f"{format_names(differing, 2)}. The sharded model gets a part of each rank's weights.{replicas}",
        fix="Set fsdp_sync_module_states: true to use rank 0's weights, or set the same seed on all ranks before the "
        "model is created.",
    )


def _hashes(model: nn.Module, from_files: Collection[int]) -> Iterator[tuple[str, int]]:
    """Yield the names of the other parameters and a hash of their bits, with one transfer for each device."""
    found: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if id(parameter) in from_files:
            continue
        if type(tensor) is torch.Tensor and tensor.numel() and not tensor.is_meta:
            found.setdefault(tensor.device, {})[canonical_name(name)] = hash_bits(tensor)
    for hashes in found.values():
        yield from zip(hashes, torch.stack(list(hashes.values())).tolist(), strict=True)
