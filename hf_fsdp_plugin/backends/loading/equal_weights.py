"""Which parameters are unchanged views of mapped files, and which weights are equal on all ranks.

``from_pretrained`` maps files, so a parameter is mostly a view of a file. If all ranks have the same view, each of them
can take its own shard from it, and no broadcast is needed. For each parameter the ranks compare a hash of what it is a
view of: the file's path, size and modification time, and the position in the file. Of a file of the Hugging Face cache,
whose name is the hash of its content, they compare name and size, because each machine may have downloaded it. A view
that this process has written to counts as changed. The bits of other tensors are compared by their hashes and sums.

Linux only: the kernel lists the mapped files in ``/proc/self/maps``, and in ``/proc/self/pagemap`` which of their pages
this process has copied to write to them (``man 5 proc_pid_pagemap``). Elsewhere no views are known.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_plugin.backends.ranks.agreement import gather_objects
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.plan.names import canonical_name
from hf_fsdp_plugin.problems import Problem
from hf_fsdp_plugin.text import format_names, plural
from hf_fsdp_plugin.torch_private.modules import local_tensor

_MAPPED_FILE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S{4} ([0-9a-f]+) \S+ \d+ +(/.*)$", re.MULTILINE)
_HASH_OF_CONTENT = re.compile("[0-9a-f]{64}")
_PAGE_OF_FILE, _PAGE_IN_USE = 61, 62
"""Bits of a page in ``/proc/self/pagemap``: whether it belongs to a file, and (62 and 63) whether it is in memory or
swapped out. A page of a mapped file that is in use without belonging to the file is a changed copy."""
_MASK = (1 << 62) - 1
"""Makes hashes positive, so that a reduction with MAX of the negated hashes returns the smallest hash of all ranks."""
_NO_VIEW = 0
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the integer type with the same size."""
_ADDED = 1 << 24
"""Number of elements that are added at a time: torch makes a copy of them with 8 bytes each."""


class MappedFiles:
    """The files that this process has mapped at one moment."""

    def __init__(self) -> None:
        try:
            with open("/proc/self/maps", errors="replace") as file:
                found = _MAPPED_FILE.findall(file.read())
        except OSError:
            found = []
        self._regions = [(int(start, 16), int(end, 16), int(offset, 16), path) for start, end, offset, path in found]

    def view(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Return the path and the position in bytes of what a tensor is an unchanged, contiguous view of, if any."""
        if not is_plain_on_cpu(tensor) or not tensor.is_contiguous():
            return None
        address = tensor.data_ptr()
        index = bisect_right(self._regions, address, key=lambda region: region[0]) - 1
        if index < 0 or address + tensor.nbytes > self._regions[index][1] or _is_changed(address, tensor.nbytes):
            return None
        start, _, offset, path = self._regions[index]
        return path, address - start + offset


def _is_changed(address: int, num_bytes: int) -> bool:
    """Return whether this process has written to a part of a mapped file."""
    first, last = address // mmap.PAGESIZE, (address + max(num_bytes, 1) - 1) // mmap.PAGESIZE
    try:
        with open("/proc/self/pagemap", "rb") as file:
            file.seek(first * 8)
            pages = numpy.frombuffer(file.read((last - first + 1) * 8), dtype=numpy.uint64)
    except OSError:
        return True
    of_file = (pages >> numpy.uint64(_PAGE_OF_FILE)) & numpy.uint64(1)
    return len(pages) == 0 or bool(((pages >> numpy.uint64(_PAGE_IN_USE) != 0) & (of_file == 0)).any())


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterMemory:
    """Which memory the parameters of a model are in on one rank. Tied parameters count once.

    Attributes:
        num_mapped: number of parameters that are unchanged views of a mapped file.
        num_private: number of parameters in memory of this process alone.
        num_on_meta: number of parameters on the meta device.
        num_on_device: number of parameters on an accelerator.
        private_bytes: host memory of this process alone.
        total_bytes: bytes of all parameters.
    """

    num_mapped: int = 0
    num_private: int = 0
    num_on_meta: int = 0
    num_on_device: int = 0
    private_bytes: int = 0
    total_bytes: int = 0


def parameter_memory(parameters: Iterable[torch.Tensor]) -> ParameterMemory:
    """Read off the addresses of the parameters which memory they are in. No collectives."""
    files, counts, num_bytes = MappedFiles(), Counter[str](), Counter[str]()
    for parameter in {id(parameter): local_tensor(parameter) for parameter in parameters}.values():
        if parameter.device.type != "cpu":
            kind = "num_on_meta" if parameter.is_meta else "num_on_device"
        else:
            kind = "num_private" if files.view(parameter) is None else "num_mapped"
        counts[kind] += 1
        num_bytes[kind] += parameter.nbytes
    return ParameterMemory(**counts, private_bytes=num_bytes["num_private"], total_bytes=num_bytes.total())


def find_mapped_parameters(model: nn.Module, device: torch.device) -> set[int]:
    """Return the ids of the parameters that all ranks have mapped from the same files.

    Collective: one reduction of two numbers for each parameter.

    Args:
        device: the device on which the numbers are reduced.
    """
    parameters, files, identity = list(model.parameters()), MappedFiles(), cache(_identity)
    if not parameters:
        return set()
    hashes = [_hash_of_view(parameter, files.view(parameter), identity) for parameter in parameters]
    is_equal = _equal_on_all_ranks(hashes, device)
    return {id(parameter) for parameter, found in zip(parameters, is_equal, strict=True) if found}


def _hash_of_view(
    parameter: nn.Parameter, view: tuple[str, int] | None, identity: Callable[[str], tuple[Any, ...] | None]
) -> int:
    if view is None or (found := identity(view[0])) is None:
        return _NO_VIEW
    return _hash(found, view[1], str(parameter.dtype), str(list(parameter.shape)))


def _identity(path: str) -> tuple[Any, ...] | None:
    """Return what all ranks with the same file have in common; ``None`` if it has been removed or replaced.

    The kernel adds "(deleted)" to the path of such a file.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    name = os.path.basename(path)
    return (name, status.st_size) if _HASH_OF_CONTENT.fullmatch(name) else (path, status.st_size, status.st_mtime_ns)


def is_plain_on_cpu(tensor: torch.Tensor) -> bool:
    """Whether the data of a tensor or parameter is an ordinary tensor in host memory."""
    return type(tensor.data) is torch.Tensor and tensor.device.type == "cpu"


def _hash(*content: object) -> int:
    digest = hashlib.blake2b(repr(content).encode(), digest_size=8).digest()
    return max(int.from_bytes(digest, "little") & _MASK, _NO_VIEW + 1)


def _equal_on_all_ranks(values: Sequence[int], device: torch.device) -> list[bool]:
    """Return for each value whether all ranks have the same, which is not that of no view. Collective."""
    extremes = torch.tensor([values, [-value for value in values]], dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    return [highest == -lowest != _NO_VIEW for highest, lowest in zip(*extremes.tolist(), strict=True)]


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
        parts = [part.sum(dtype=torch.int64) for part in tensor.reshape(-1).split(_ADDED)]
        return torch.stack(parts).sum()


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
