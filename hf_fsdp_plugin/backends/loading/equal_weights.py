"""Which weights are equal on all ranks: views of equal files, or tensors with equal hashes.

``from_pretrained`` maps files, so a parameter is mostly a view of a file. If all ranks have the same view, each of them
can take its own shard from it, and no broadcast is needed. For each parameter the ranks compare a hash of what it is a
view of: the identity of the file, and the position in it (:mod:`hf_fsdp_plugin.backends.loading.mapped_files`). The
bits of other tensors are compared by their hashes and sums.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.loading.mapped_files import MappedFiles, file_identity
from hf_fsdp_plugin.backends.ranks.agreement import gather_objects
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names, plural

_MASK = (1 << 62) - 1
"""Makes hashes positive, so that a reduction with MAX of the negated hashes returns the smallest hash of all ranks."""
_NO_VIEW = 0
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integer type with the same size."""
_COPIED = 1 << 24
"""Elements of a tensor at an odd address that are copied at a time."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""Spreads the bits of the sum, so that the XOR of equal words does not undo it."""


def find_mapped_parameters(model: nn.Module, device: torch.device) -> set[int]:
    """Return the ids of the parameters that all ranks have mapped from the same files.

    Collective: one reduction of two numbers for each parameter.

    Args:
        device: the device on which the numbers are reduced.
    """
    files, identity, hashes = MappedFiles(), cache(file_identity), dict[int, int]()
    for parameter in model.parameters():
        hashes[id(parameter)] = _NO_VIEW
        if (view := files.view(parameter)) is not None and (file := identity(view[0])) is not None:
            hashes[id(parameter)] = _hash(file, view[1], str(parameter.dtype), str(list(parameter.shape)))
    if not hashes:
        return set()
    is_equal = _equal_on_all_ranks([*hashes.values()], device)
    return {key for key, is_same in zip(hashes, is_equal, strict=True) if is_same}


def _hash(*content: object) -> int:
    digest = hashlib.blake2b(repr(content).encode(), digest_size=8).digest()
    return max(int.from_bytes(digest, "little") & _MASK, _NO_VIEW + 1)


def _equal_on_all_ranks(values: Sequence[int], device: torch.device) -> list[bool]:
    """Return for each value whether all ranks have the same, which is not that of no view. Collective."""
    extremes = torch.tensor([values, [-value for value in values]], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    return [highest == -lowest != _NO_VIEW for highest, lowest in zip(*extremes.tolist(), strict=True)]


def hash_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a hash of a tensor's bits as an int64 scalar on its device; the sum of its bits if that has no kernel.

    torch's hash is an XOR, which stays the same if an even number of equal elements change alike, as weights of 1.0 do.
    So the sum is a part of the hash, too.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    # torch has no kernel for fp8 and unsigned integers
    flat = tensor.contiguous().reshape(-1).view(INTEGERS[tensor.element_size()])
    added = _sum_of_bits(flat)
    try:
        return torch.hash_tensor(flat).view(torch.int64) ^ (added * _ODD)
    except NotImplementedError:  # torch 2.13 has kernels for CPU and CUDA
        return added


def _sum_of_bits(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of the integers of 64 bits in the memory of a tensor, and of the elements at its end."""
    per_word = 8 // flat.element_size()
    words, rest = flat.split([flat.numel() - flat.numel() % per_word, flat.numel() % per_word])
    is_aligned = flat.data_ptr() % 8 == 0 == flat.storage_offset() % per_word
    parts = [words] if is_aligned else (part.clone() for part in words.split(_COPIED))
    return torch.stack([rest.sum(dtype=torch.int64), *(part.view(torch.int64).sum() for part in parts)]).sum()


def read_together(tensors: Mapping[Any, torch.Tensor]) -> dict[Any, Any]:
    """Return the values of tensors of one shape, for which the host waits for the device once."""
    device = next((tensor.device for tensor in tensors.values()), None)
    values = torch.stack([tensor.to(device) for tensor in tensors.values()]).tolist() if tensors else []
    return dict(zip(tensors, values, strict=True))


def check_same_weights(plan: FsdpPlan, model: nn.Module, device: torch.device) -> Problem | None:
    """Return a warning if the parameters of the model that is to be sharded differ between ranks. Collective.

    Every parameter is read once, except those that all ranks have mapped from equal files. Two numbers are reduced over
    all ranks; names are exchanged only if these differ.
    """
    if plan.pre_sharded or plan.ram_efficient or plan.sync_module_states or plan.world_size == 1:
        return None
    mapped = find_mapped_parameters(model, device)
    found = {
        canonical_name(name): hash_bits(parameter)
        for name, parameter in model.named_parameters()
        if id(parameter) not in mapped and type(parameter.data) is torch.Tensor and not parameter.is_meta
        if parameter.numel()
    }
    hashes = read_together(found)
    if all(_equal_on_all_ranks([_hash(*hashes.values())], device)):
        return None
    of_ranks = gather_objects(hashes)
    differing = [name for name, bits in of_ranks[0].items() if any(other.get(name) != bits for other in of_ranks)]
    message = f"the ranks have different weights in {plural(len(differing), 'parameter')} of {plan.model_class}: "
    message += f"{format_names(differing, 2)}. The sharded model gets a part of each rank's weights."
    message += " The replicas will stay different." if plan.mesh.replicate > 1 else ""
    fix = "Set fsdp_sync_module_states: true to use rank 0's weights, or set the same seed on all ranks before the "
    fix += "model is created."
    return Problem(code="FSDP-W325", setting="loading.sync_module_states", message=message, fix=fix)
